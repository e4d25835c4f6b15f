"""`python -m specdec.testing <drafter> [key=value ...]`: a table, rule by rule; exit code 1 if any
is broken.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable

from specdec.errors import SpecdecError
from specdec.testing.conformance import RULES, Finding, read_values, run_conformance
from specdec.testing.subject import Subject

_COLOURS = {"passed": "green", "broken": "bold red", "not applicable": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    """Check a drafter; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m specdec.testing", description="Hold a drafter to the rules of the runner."
    )
    parser.add_argument("drafter", help="registered name, entry point, or module:ClassName")
    parser.add_argument("values", nargs="*", metavar="key=value", help="the drafter's parameters")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:<index>")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=3, metavar="K")
    parser.add_argument("--target", help="folder or hub id; the default is a tiny random model")
    parser.add_argument("--quick", action="store_true", help="leave the slower rules out")
    parser.add_argument("--rule", action="append", metavar="NAME", help="only this rule; repeat")
    options = parser.parse_args(arguments)
    names = [rule.name for rule in RULES]
    unknown = [name for name in options.rule or [] if name not in names]
    if unknown:
        print(f"error: no rule {unknown[0]!r}; known: {', '.join(names)}", file=sys.stderr)
        return 1
    chosen = [
        rule
        for rule in RULES
        if (not options.rule or rule.name in options.rule) and not (options.quick and rule.slow)
    ]
    try:
        spec = {"name": options.drafter, **read_values(options.values)}
        subject = Subject(spec, options.num_speculative_tokens, options.device, options.target)
        assert subject.probe is not None  # a wrong name or value is refused here, in one sentence
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    findings = _show(f"drafter {options.drafter}", run_conformance(subject, chosen))
    broken = [finding for finding in findings if finding.verdict == "broken"]
    counts = Counter(finding.verdict for finding in findings)
    print("\n" + ", ".join(f"{counts[verdict]} {verdict}" for verdict in _COLOURS))
    for finding in broken:
        print(f"\n{finding.message}", file=sys.stderr)
    return 1 if broken else 0


def _show(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print a table of findings, growing as they come; returns them."""
    from rich.live import Live
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("rule", "verdict", "s", "what it proves, or why it does not apply"):
        table.add_column(column, justify="right" if column == "s" else "left")
    kept = []
    with Live(table, auto_refresh=False) as live:
        for finding in findings:
            kept.append(finding)
            applies = finding.verdict != "not applicable"
            words = finding.rule.proves if applies else finding.message
            if finding.verdict == "passed" and finding.message:
                words += f" ({finding.message})"
            colour = _COLOURS[finding.verdict]
            table.add_row(
                finding.rule.name,
                f"[{colour}]{finding.verdict}[/{colour}]",
                f"{finding.seconds:.1f}",
                words,
            )
            live.refresh()
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
