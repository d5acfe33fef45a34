"""mini-swe-agent in a sandbox.

Its source distribution ships no tests of its environments. So its own local environment is asked
the same as ours, and both must answer the same; its `get_environment`, its agents with its
deterministic model, and its command line with a configuration file are used as they are.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltabox import KeepFitting, KeepLast, RollbackError, SandboxClosed

from .test_trail import RING

NAME = "deltabox.integrations.minisweagent.DeltaBoxEnvironment"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SERVER = """
import http.server
class Counter(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Counter.count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(Counter.count).encode())
    def log_message(self, *about):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Counter).serve_forever()
"""
ASK = (
    "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000', timeout=10).read()"
    ".decode())"
)
UNTIL_UP = f'until python3 -c "{ASK}" 2>/dev/null; do sleep 0.05; done'


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisweagent", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "minisweagent.exceptions", raising=False)
    monkeypatch.delitem(sys.modules, "deltabox.integrations.minisweagent", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'deltabox\[swe\]'"):
        importlib.import_module("deltabox.integrations.minisweagent")


class Mini:
    """What is used of both, imported when a test runs: not all who collect it have installed it."""

    def __init__(self) -> None:
        ours = importlib.import_module("deltabox.integrations.minisweagent")
        self.Environment: Any = ours.DeltaBoxEnvironment
        self.rewind, self.branch, self.resume = ours.rewind, ours.branch, ours.resume
        environments = importlib.import_module("minisweagent.environments")
        self.get_environment: Any = environments.get_environment
        self.Local: Any = importlib.import_module(
            "minisweagent.environments.local"
        ).LocalEnvironment
        self.Docker: Any = importlib.import_module("minisweagent.environments.docker")
        self.Submitted: Any = importlib.import_module("minisweagent.exceptions").Submitted
        self.Agent: Any = importlib.import_module("minisweagent.agents.default").DefaultAgent
        models = importlib.import_module("minisweagent.models.test_models")
        self.Model: Any = models.DeterministicModel
        self.make_output: Any = models.make_output

    def model(self, *messages: list[str]) -> Any:
        """One that answers with these messages, each some commands."""
        return self.Model(
            outputs=[
                self.make_output(f"message {n}", [{"command": command} for command in commands])
                for n, commands in enumerate(messages)
            ]
        )

    def agent(self, environment: Any, *messages: list[str], **settings: Any) -> Any:
        settings |= {"system_template": "You are.", "instance_template": "Do {{task}}."}
        return self.Agent(self.model(*messages), environment, **settings | {"cost_limit": 0})


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mini]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSWEA_SILENT_STARTUP", "1")
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("mini")))
        yield Mini()


@pytest.fixture
def environment(mini: Mini) -> Iterator[Any]:
    with mini.Environment(cwd="/srv") as made:
        yield made


def run(environment: Any, command: str) -> str:
    """A step that must go well."""
    answer = environment.execute({"command": command})
    assert answer["returncode"] == 0, answer
    output: str = answer["output"]
    return output


# -- the contract ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "output": {"command": "echo hello world"},
    "nothing": {"command": ""},
    "no command": {},
    "exit code": {"command": "exit 42"},
    "a signal": {"command": "kill -9 $$"},
    "both streams in order": {"command": "for n in 1 2 3; do echo out $n; echo err $n >&2; done"},
    "lines": {"command": "printf 'a\\nb\\r\\nc'"},
    "not UTF-8": {"command": "printf 'a\\377\\303\\244'"},
    "no such program": {"command": "no-such-program-1 2>/dev/null"},
    "variables": {"command": "echo $ONE $TWO $THREE"},
    "a pipe and a substitution": {"command": "echo $(echo 'a b') | tr a-z A-Z"},
    "standard input is not read": {"command": "echo x | cat; cat < /dev/null"},
    "quotes": {"command": "echo \"it's\" '\"' \\$HOME"},
    "here": {"command": "cat <<'EOF'\n$x `y`\nEOF"},
    "fresh each time": {"command": "echo $SET; SET=1; cd /; exec 1>&2"},
    "much": {"command": "head -c 300000 /dev/zero | tr '\\0' x"},
    "a NUL": {"command": "echo a\0b"},
    "not text": {"command": 7},
    "not finished": {"command": f"{SUBMIT}; exit 3"},
    "finished too late": {"command": f"echo first; {SUBMIT}"},
}


@pytest.fixture(scope="module")
def pair(mini: Mini, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Theirs and ours, set up alike: a shell that both have, and variables."""
    variables = {"ONE": "1", "TWO": "two words"}
    theirs = mini.Local(cwd=str(tmp_path_factory.mktemp("local")), env=variables, timeout=20)
    interpreter = ["/bin/sh", "-c"]
    with mini.Environment(cwd="/srv", env=variables, timeout=20, interpreter=interpreter) as ours:
        yield theirs, ours


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_theirs_does(pair: tuple[Any, Any], name: str) -> None:
    theirs, ours = (environment.execute(dict(CASES[name])) for environment in pair)
    if theirs["returncode"] == -1:  # each says in its own words what is wrong with a command
        assert ours["returncode"] == -1 and ours.keys() == theirs.keys()
        assert ours["exception_info"].startswith("An error occurred while executing the command: ")
        assert ours["extra"].keys() == theirs["extra"].keys() and ours["extra"]["exception"]
    else:
        assert ours == theirs


@pytest.mark.full
def test_a_timeout_is_answered_as_theirs_is(pair: tuple[Any, Any]) -> None:
    action = {"command": "echo begun; sleep 600 & sleep 600"}
    theirs, ours = (environment.execute(action, timeout=1) for environment in pair)
    assert ours == theirs and ours["extra"]["exception_type"] == "TimeoutExpired"
    assert "begun" in ours["output"] and "timed out" in ours["exception_info"]
    assert not pair[1].sandbox.processes()
    # both are as good as before
    assert [environment.execute({"command": "echo on"})["output"] for environment in pair] == [
        "on\n",
        "on\n",
    ]


@pytest.mark.full
def test_where_it_runs(mini: Mini, environment: Any) -> None:
    assert run(environment, "pwd") == "/srv\n"
    assert environment.execute({"command": "pwd"}, "/usr")["output"] == "/usr\n"
    assert environment.execute({"command": "pwd"}, cwd="/usr")["output"] == "/usr\n"
    theirs = mini.Local().execute({"command": "pwd"}, cwd="/no/such")
    ours = environment.execute({"command": "pwd"}, cwd="/no/such")
    assert (ours["returncode"], ours["output"]) == (theirs["returncode"], theirs["output"])
    assert ours["extra"]["exception_type"] == theirs["extra"]["exception_type"]


@pytest.mark.full
@pytest.mark.parametrize("text", ["done\n", "", " two\n  lines\n"])
def test_submission(pair: tuple[Any, Any], mini: Mini, text: str) -> None:
    messages = []
    for environment in pair:
        with pytest.raises(mini.Submitted) as raised:
            environment.execute({"command": f"echo; {SUBMIT}; printf '{text}'"})
        messages.append(raised.value.messages)
    assert messages[0] == messages[1] and messages[1][0]["content"] == text
    # it is a step like any other
    assert pair[1].steps[-1].output["returncode"] == 0


@pytest.mark.full
def test_variables_of_the_host(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "host")
    monkeypatch.setenv("BOTH", "host")
    monkeypatch.setenv("KEPT", "host")
    forward = ["GIVEN", "BOTH", "NOT_SET"]
    with mini.Environment(forward_env=forward, env={"BOTH": "own"}) as environment:
        assert run(environment, "echo $GIVEN $BOTH ${KEPT-no} ${NOT_SET-no}") == "host own no no\n"


@pytest.mark.full
def test_a_login_shell_unless_said_otherwise(mini: Mini, environment: Any) -> None:
    assert run(environment, "shopt login_shell").split() == ["login_shell", "on"]
    defaults = mini.Docker.DockerEnvironmentConfig(image="x")
    for name in ("env", "forward_env", "timeout", "interpreter"):
        assert getattr(environment.config, name) == getattr(defaults, name)
    with mini.Environment(interpreter=["python3", "-c"]) as python:
        assert run(python, "print(6 * 7)") == "42\n"
    with mini.Environment(interpreter=["no-such-shell"]) as broken:
        answer = broken.execute({"command": "x"})
        assert answer["returncode"] == 127 and "no-such-shell" in answer["output"]


@pytest.mark.full
def test_template_variables_and_serialization(mini: Mini, environment: Any) -> None:
    theirs = mini.Local(cwd="/srv")
    given = environment.get_template_vars(extra="x")
    assert given["cwd"] == "/srv" and given["extra"] == "x" and given["timeout"] == 30
    for name in ("system", "release", "version", "machine"):
        assert given[name] == theirs.get_template_vars()[name]
    run(environment, "true")
    assert environment.steps[-1].checkpoint
    shown = json.loads(json.dumps(environment.serialize()))["info"]
    assert shown["config"].keys() == theirs.serialize()["info"]["config"].keys()
    assert shown["config"]["environment_type"] == NAME
    assert shown["config"]["environment"]["keep"] == {"kind": "all"}
    steps = shown["deltabox"]["steps"]
    assert [(step["step"], step["problem"]) for step in steps] == [(0, None), (1, None)]
    assert [step["checkpoint"] for step in steps] == [
        step.checkpoint.id for step in environment.steps
    ]
    # what was written down makes such an environment again
    again = shown["config"]["environment"] | {"environment_class": NAME}
    with mini.get_environment(again) as other:
        assert other.config == environment.config


@pytest.mark.full
@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (20, KeepLast(20)),
        ({"kind": "last", "count": 3}, KeepLast(3)),
        ({"kind": "fitting"}, KeepFitting()),
        (KeepFitting(), KeepFitting()),
    ],
)
def test_what_to_keep(mini: Mini, said: Any, meant: Any) -> None:
    with mini.get_environment({"environment_class": NAME, "keep": said}) as environment:
        assert environment.config.keep == meant


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep": {"kind": "some"}}, "kinds all, last, reachable, fitting"),
        ({"keep": {"kind": "last"}}, "kind: last, count: 20"),
        ({"keep": -1}, "0 or more"),
        ({"image": "python:3.11"}, "image"),
        ({"sandbox": {"netwrok": "nat"}}, "netwrok"),
    ],
)
def test_wrong_settings(mini: Mini, settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        mini.Environment(**settings)


@pytest.mark.full
def test_the_end(mini: Mini) -> None:
    environment = mini.Environment()
    sandbox = environment.sandbox
    environment.cleanup()
    environment.cleanup()
    assert sandbox.closed
    with pytest.raises(SandboxClosed):  # it would answer every command of the agent in vain
        environment.execute({"command": "true"})
    dropped = mini.Environment()
    sandbox = dropped.sandbox
    del dropped
    assert sandbox.closed


# -- steps -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_live_server_goes_back(environment: Any) -> None:
    environment.sandbox.files.write_text("/srv/server.py", SERVER)
    run(environment, "python3 server.py & echo $! > pid")
    assert run(environment, UNTIL_UP).strip() == "1"
    up = environment.steps[-1]
    assert run(environment, f'python3 -c "{ASK}"') == "2\n"
    run(environment, "kill $(cat pid); rm server.py")
    assert environment.execute({"command": f'python3 -c "{ASK}" 2>&1'})["returncode"] != 0
    environment.rollback(up)
    assert run(environment, f'python3 -c "{ASK}"') == "2\n"
    assert run(environment, "ls") == "pid\nserver.py\n"
    with environment.fork(up) as other:
        assert run(other, f'python3 -c "{ASK}"') == "2\n"
        assert run(environment, f'python3 -c "{ASK}"') == "3\n"
        assert run(other, f'python3 -c "{ASK}"') == "3\n"
        assert other.config == environment.config and other.sandbox != environment.sandbox


@pytest.mark.full
def test_what_cannot_be_kept(mini: Mini) -> None:
    with mini.Environment(cwd="/srv", sandbox={"io_uring": True}) as environment:
        environment.sandbox.files.write_text("/srv/ring.py", RING)
        run(environment, "python3 ring.py > ring & until [ -s ring ]; do sleep 0.05; done")
        run(environment, "echo on")
        with pytest.raises(RollbackError, match=r"step 1 .*UnsupportedState.*io_uring"):
            environment.rollback(1)
        (_, first, second) = environment.serialize()["info"]["deltabox"]["steps"]
        assert "io_uring" in first["problem"] and first["checkpoint"] is None
        assert second["problem"] is None or "io_uring" in second["problem"]
        environment.rollback(0)
        assert run(environment, "ls") == ""


@pytest.mark.full
def test_the_patch_can_always_be_had(mini: Mini) -> None:
    with mini.Environment(cwd="/srv", keep=1) as environment:
        for n in range(4):
            run(environment, f"echo {n} >> a")
        start = environment.steps[0].checkpoint
        assert "+0\n+1\n+2\n+3\n" in environment.sandbox.patch(start, under="/srv")


# -- agents ------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_agent_from_begin_to_end(mini: Mini, environment: Any, tmp_path: Path) -> None:
    output = tmp_path / "trajectory.json"
    agent = mini.agent(
        environment,
        ["echo 1 > a"],
        ["cat a; exit 3", "sleep 60"],
        [f"{SUBMIT}; cat a"],
        output_path=output,
    )
    environment.config.timeout = 1
    assert agent.run("something") == {"exit_status": "Submitted", "submission": "1\n"}
    assert [step.action["command"] for step in environment.steps[1:]] == [
        "echo 1 > a",
        "cat a; exit 3",
        "sleep 60",
        f"{SUBMIT}; cat a",
    ]
    written = json.loads(output.read_text())
    assert written["info"]["config"]["environment_type"] == NAME
    assert len(written["info"]["deltabox"]["steps"]) == 5
    seen = [m["content"] for m in agent.messages if "raw_output" in m.get("extra", {})]
    assert "<returncode>3</returncode>" in seen[1] and "timed out after 1 seconds" in seen[2]


@pytest.mark.full
def test_an_agent_goes_back_and_takes_another_way(mini: Mini, environment: Any) -> None:
    agent = mini.agent(environment, ["echo 1 > a"], ["rm a"], [f"{SUBMIT}; cat a; true"])
    agent.run("x")
    assert "No such file" in agent.messages[-1]["extra"]["submission"]
    mini.rewind(agent, 1)
    assert [message["role"] for message in agent.messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    agent.model = mini.model(["echo 2 >> a"], [f"{SUBMIT}; cat a"])
    assert mini.resume(agent) == {"exit_status": "Submitted", "submission": "1\n2\n"}
    assert [step.action["command"] for step in environment.steps[1:3]] == [
        "echo 1 > a",
        "echo 2 >> a",
    ]
    assert agent.n_calls == 5  # what was spent is spent
    mini.rewind(agent, 0)
    assert [message["role"] for message in agent.messages] == ["system", "user"]
    assert run(environment, "ls") == ""


@pytest.mark.full
def test_agents_branch(mini: Mini, environment: Any) -> None:
    agent = mini.agent(environment, ["echo 1 > a"], ["echo 2 > a"], [f"{SUBMIT}; cat a"])
    agent.run("x")
    other = mini.branch(agent, 1)
    with other.env:
        other.model = mini.model(["echo 3 >> a"], [f"{SUBMIT}; cat a"])
        assert mini.resume(other)["submission"] == "1\n3\n"
        assert agent.messages[-1]["extra"]["submission"] == "2\n"
        assert run(environment, "cat a") == "2\n" and run(other.env, "cat a") == "1\n3\n"


@pytest.mark.full
def test_messages_that_lead_to_no_step_or_to_several(mini: Mini, environment: Any) -> None:
    run(environment, "echo before the agent > a")  # step 1
    agent = mini.agent(environment, ["true", "echo 3"], [], ["false", SUBMIT, "never done"])
    assert agent.run("x")["exit_status"] == "Submitted"
    assert len(environment.steps) == 6
    with pytest.raises(ValueError, match=r"step 2 is in the middle .* steps 2 to 3: go to 1 or 3"):
        mini.rewind(agent, 2)
    with pytest.raises(ValueError, match="step 4 is in the middle"):
        mini.rewind(agent, 4)
    with pytest.raises(ValueError, match="step 5 ended the run"):
        mini.rewind(agent, 5)
    with pytest.raises(IndexError, match="no step 6"):
        mini.branch(agent, 6)
    assert len(environment.steps) == 6 and agent.messages[-1]["role"] == "exit"
    mini.rewind(agent, 3)
    assert len(environment.steps) == 4 and len(agent.messages) == 6
    assert (
        agent.messages[-1]["content"] == "message 1"
    )  # it has seen the outputs, and asked for nothing
    mini.rewind(agent, 1)
    assert [message["role"] for message in agent.messages] == ["system", "user"]


@pytest.mark.full
def test_messages_of_another_way(mini: Mini, environment: Any) -> None:
    agent = mini.agent(environment, ["echo 1"], [SUBMIT])
    agent.run("x")
    left = environment.steps[1]
    mini.rewind(agent, 0)
    agent.model = mini.model(["echo 2"], [SUBMIT])
    mini.resume(agent)
    with pytest.raises(ValueError, match="step 1 is of another way"):
        mini.rewind(agent, left)
    agent.messages = json.loads(json.dumps(agent.messages))
    with pytest.raises(ValueError, match="copied, or loaded"):
        mini.rewind(agent, 1)


@pytest.mark.full
def test_a_resumed_agent_ends_as_one_that_runs(mini: Mini, environment: Any) -> None:
    errors = importlib.import_module("minisweagent.exceptions")

    def failing(error: Exception) -> Any:
        def query(messages: list[dict[str, Any]], **about: Any) -> None:
            raise error

        model = mini.Model(outputs=[])
        model.query = query
        return model

    agent = mini.agent(environment, ["true"], ["true"], step_limit=1)
    assert agent.run("x")["exit_status"] == "LimitsExceeded"
    mini.rewind(agent, 1)
    assert mini.resume(agent)["exit_status"] == "LimitsExceeded"
    mini.rewind(agent, 1)
    agent.config.step_limit = 0
    spent = agent.cost
    wrong = {"role": "user", "content": "what?", "extra": {"cost": 0.5}}
    agent.model = failing(errors.FormatError(wrong))
    assert mini.resume(agent)["exit_status"] == "RepeatedFormatError"
    assert agent.cost == spent + 1.5
    mini.rewind(agent, 0)
    agent.model = failing(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        mini.resume(agent)
    assert agent.messages[-1]["extra"]["exit_status"] == "RuntimeError"


@pytest.mark.full
def test_ctrl_c_is_a_step(mini: Mini, environment: Any) -> None:
    """Their interactive agent goes on after it; so must the steps."""
    ready = threading.Event()

    def interrupt() -> None:
        ready.wait(20)
        while not environment.sandbox.files.exists("/srv/begun"):
            pass
        os.kill(os.getpid(), 2)

    worker = threading.Thread(target=interrupt)
    worker.start()
    ready.set()
    with pytest.raises(KeyboardInterrupt):
        environment.execute({"command": "touch begun; sleep 600"})
    worker.join()
    assert environment.steps[1].output is None
    assert run(environment, "ls") == "begun\n"
    environment.rollback(0)
    assert run(environment, "ls") == ""


@pytest.mark.full
def test_their_command_line_with_a_configuration_file(tmp_path: Path) -> None:
    outputs = [
        {"role": "assistant", "content": "", "extra": {"actions": [{"command": command}]}}
        for command in ("echo 1 > a; pwd", f"{SUBMIT}; cat a")
    ]
    config = {  # JSON is YAML
        "agent": {"system_template": "You are.", "instance_template": "Do {{task}} on {{system}}."},
        "model": {"model_class": "deterministic", "model_name": "none", "outputs": outputs},
        "environment": {"environment_class": NAME, "cwd": "/srv", "keep": 5},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "minisweagent", "-y", "--exit-immediately", "-t", "it"]
    done = subprocess.run(
        [*command, "-c", str(tmp_path / "config.yaml"), "-o", str(tmp_path / "out.json")],
        env=os.environ | {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path), "MSWEA_CONFIGURED": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["info"]["submission"] == "1\n"
    assert written["info"]["config"]["environment"]["keep"] == {"kind": "last", "count": 5}
    assert len(written["info"]["deltabox"]["steps"]) == 3
    assert not Path("/srv/a").exists()
