"""Weights & Biases whose server goes away, and what of a configuration reaches it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments import sweep_results
from specdec.tracker import NullTracker, WandbConfig, hide_secrets, without_secrets

ROOT = Path(__file__).parent.parent

# In a process of its own, for its end has to be seen, too. The server knows the three questions
# that the client asks before it takes numbers.
_CODE = """
import json, logging, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROJECT = {"id": "p", "name": "specdec", "entity": {"id": "e", "name": "me"}}
ANSWERS = {
    "UpsertBucket": {
        "upsertBucket": {"bucket": {"id": "x", "name": "r", "project": PROJECT}, "inserted": True}
    },
    "CreateRunFiles": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}},
    "Viewer": {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}},
}
received = []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        received.append(body)
        asked = [data for name, data in ANSWERS.items() if name in body]
        self.answer(json.dumps({"data": asked[0] if asked else {}}).encode())

    def do_GET(self):
        self.answer(b"{}")

    def answer(self, out):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
os.environ["WANDB_API_KEY"] = "k" * 40

from specdec import tracker as module

logging.basicConfig(level=logging.INFO)
module._FINISH_TIMEOUT_S = 3.0
folder = Path(sys.argv[1])
config = {"drafter": {"name": "ngram", "min_n": 1}, "compare": [{"drafter": {"api_key": "sk-1"}}]}
tracker = module.make_tracker(module.WandbConfig(mode="online"), config, folder, "ngram K=4")
location = tracker.location
tracker.log({"x": 1.0}, step=0)
server.shutdown()
server.server_close()
tracker.log({"x": 2.0}, step=1)
if sys.argv[2] == "all":
    tracker.log_table("arms", [{"arm": "none"}])
    tracker.log_artifact_folder(folder, "run-x")
started = time.monotonic()
tracker.finish()
tracker.log({"x": 3.0}, step=2)
result = {"location": location, "finish_s": time.monotonic() - started, "received": received}
print(json.dumps(result), flush=True)
"""


# The client itself asks a lost server for ten seconds before a table or an artifact fails.
@pytest.mark.parametrize("what", ["numbers", pytest.param("all", marks=pytest.mark.slow)])
def test_a_server_that_goes_away_does_not_hold_a_run(tmp_path: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path), what],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,  # the client's own would be without end
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "/me/specdec/runs/" in result["location"]
    assert result["finish_s"] < 30
    assert done.stderr.count("the run goes on") == 1, done.stderr
    assert "wandb sync" in done.stderr
    assert list((tmp_path / "wandb").glob("run-*/*.wandb"))
    sent = [json.loads(body)["variables"] for body in result["received"]]
    config = next(json.loads(v["config"]) for v in sent if v.get("config"))
    assert config["drafter"]["value"] == {"name": "ngram", "min_n": 1}
    assert config["compare"]["value"] == [{"drafter": {"api_key": "(left out)"}}]
    assert not any("sk-1" in body for body in result["received"])


def test_secrets_are_left_out_at_any_depth() -> None:
    tree = {
        "sampling": {"max_tokens": 3, "eos_token_id": 2},
        "arms": [{"hf_token": "t1", "k": 3}, ("plain", {"password": "t2"})],
        "API_KEY": "t3",
    }
    assert without_secrets(tree) == {
        "sampling": {"max_tokens": 3, "eos_token_id": 2},
        "arms": [{"hf_token": "(left out)", "k": 3}, ["plain", {"password": "(left out)"}]],
        "API_KEY": "(left out)",
    }


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("run drafter.api_key=sk-1 seed=2", "run drafter.api_key=(left out) seed=2"),
        ("run x.api-key=sk-1 seed=2", "run x.api-key=(left out) seed=2"),
        ("run '+x={hf_token: t, k: 3}'", "run '+x={hf_token:(left out), k: 3}'"),
        ("run sampling.max_tokens=12", "run sampling.max_tokens=12"),
        ("run engine.token_table=pinned", "run engine.token_table=pinned"),
        ("run '+x.password=a b c'", "run '+x.password=(left out)'"),
        ("""run '+x.password="a b",c]d' k=3""", "run '+x.password=(left out)' k=3"),
        ("""run '+x.secret='"'"'a b'"'"''""", "run '+x.secret=(left out)'"),
        ("run x.token=a,b", "run x.token=(left out)"),
        ("""run 'x={api_key: "a, b", k: 3}'""", "run 'x={api_key:(left out), k: 3}'"),
        ("run 'x={k: 3, api_key: a b}'", "run 'x={k: 3, api_key:(left out)}'"),
        ("run 'x.api_keys=[a,b]'", "run 'x.api_keys=(left out)'"),
        ("run 'prompts.path=my file.jsonl' k=2", "run 'prompts.path=my file.jsonl' k=2"),
    ],
)
def test_secrets_on_the_command_line_are_left_out(command: str, shown: str) -> None:
    assert hide_secrets(command).replace(": (left", ":(left") == shown


def test_a_sweeps_own_run_tells_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def take(_: object, settings: object, *rest: object) -> NullTracker:
        told.append(settings)
        return NullTracker()

    monkeypatch.setattr(sweep_results, "make_tracker", take)
    config = OmegaConf.create(
        {
            "tracker": OmegaConf.structured(WandbConfig(mode="offline")),
            "sweep": {"group": "g"},
            "hydra": {
                "overrides": {"task": ["drafter.api_key=sk-1,sk-2", "seed=1,2"]},
                "runtime": {"choices": {}},
            },
        }
    )
    sweep_results._track(config, [], [], tmp_path)
    assert told == [{"sweep": ["drafter.api_key=(left out)", "seed=1,2"]}]
