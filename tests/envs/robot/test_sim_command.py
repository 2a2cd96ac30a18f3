"""`guerdon robot-sim` as a program of its own."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from guerdon.cli.main import main
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.envs.robot import RobotEnv

RUN = [sys.executable, "-c", "from guerdon.cli.main import command; command()", "robot-sim"]


def test_it_serves_until_ctrl_c():
    flags = [
        "--json",
        "--port",
        "0",
        "--time-scale",
        "20",
        "--image-size",
        "48",
        "--faults",
        "drop_rate=0.01",
    ]
    with subprocess.Popen(
        [*RUN, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            reported = json.loads(program.stdout.readline())
            env = RobotEnv(RobotEnvConfig(url=reported["url"], time_scale=20.0, image_size=(48, 48)))
            obs, _ = env.reset(seed=0)
            assert obs["main_images"].shape == (48, 48, 3)
            env.close()
            with urllib.request.urlopen(f"{reported['url']}/sim/camera/front_camera?format=png") as answer:
                assert answer.read().startswith(b"\x89PNG")
        finally:
            program.send_signal(signal.SIGINT)
        assert program.wait(240) == 0
        assert "Traceback" not in program.stderr.read()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--faults", "drop_rat=0.1"], "faults.drop_rate"),
        (["--faults", "drop_rate=2"], "from 0 to 1"),
        (["--time-scale", "0"], "time_scale"),
        (["--port", "70000"], "cannot listen"),
        (["--host", "no-such-host.invalid"], "cannot listen"),
    ],
)
def test_wrong_flags_are_named(capsys, flags, complaint):
    assert main(["robot-sim", "--port", "0", *flags]) == 2
    assert complaint in capsys.readouterr().err
