"""Tells Hydra where this package's options lie; without a YAML of one's own it is not needed."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class TemplateDrafterSearchPath(SearchPathPlugin):
    """Adds `template_drafter/conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append it: what specdec ships comes first."""
        search_path.append("template-drafter", "pkg://template_drafter.conf")
