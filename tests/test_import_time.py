# SPDX-License-Identifier: Apache-2.0
"""`import omnitrl` and `omnitrl --help` stay quick, because nothing heavy is imported before it is needed."""

import subprocess
import sys
import time

import pytest

import omnitrl


HEAVY = {"torch", "transformers", "diffusers", "accelerate", "peft", "trl", "datasets", "matplotlib", "rich", "numpy"}
IMPORT = "import omnitrl"
HELP = "import runpy, sys; sys.argv = ['omnitrl', '--help']; runpy.run_module('omnitrl.cli.main', run_name='__main__')"


def best_of_three(code):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@pytest.mark.parametrize(("code", "limit"), [(IMPORT, 0.5), (HELP, 1.0)])
def test_it_takes_no_longer_than(code, limit):
    assert best_of_three(code) - best_of_three("pass") <= limit


@pytest.mark.parametrize("code", [IMPORT, HELP])
def test_it_imports_nothing_heavy(code):
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr)); "
    done = subprocess.run([sys.executable, "-c", report + code], check=True, capture_output=True, text=True)
    modules = set(done.stderr.split())
    assert "omnitrl" in modules
    assert modules & HEAVY == set()


def test_every_public_name_can_be_imported():
    for name in omnitrl.__all__:
        assert name in dir(omnitrl)
        value = getattr(omnitrl, name)
        if name != "__version__":
            assert value.__name__ == name


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match=r"no attribute 'FlowGRPOTrainr'; it has AWMConfig, .*FlowGRPOTrainer"):
        _ = omnitrl.FlowGRPOTrainr
