# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios in several gloo processes, and brings back what each of them returned."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch


ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class Launch:
    """
    `torchrun --nproc_per_node N -m MODULE FOLDER NAME …`, with the output of all processes in one file.

    A module's `main` runs the functions of these names with `FOLDER/<name>` and saves what each returns.
    """

    def __init__(self, module, folder, *names, processes=2, environment=None):
        self.folder, self.processes = Path(folder), processes
        self.log = self.folder / "output.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "-m", module, str(folder), *names],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout):
        """The exit code; a run that takes longer is ended, all its processes with it, and fails."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still running after {timeout} s:\n{self.output()}") from None

    def wait_for(self, path, timeout=90):
        """Waits until a process has made the file `path`."""
        end = time.monotonic() + timeout
        while not Path(path).exists():
            assert self.process.poll() is None, f"ended before there was {path}:\n{self.output()}"
            assert time.monotonic() < end, f"no {path} after {timeout} s:\n{self.output()}"
            time.sleep(0.05)

    def output(self):
        return self.log.read_text(errors="replace")

    def results(self, name):
        """What the scenario returned, one entry per rank."""
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(self.processes)]
        missing = [file.name for file in files if not file.is_file()]
        assert not missing, f"no {missing}:\n{self.output()}"
        return [torch.load(file, weights_only=False) for file in files]


def main(scenarios):
    """The other side: runs the scenarios that the command line names, for a module that was started by `Launch`."""
    folder, *names = sys.argv[1:]
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        result = scenarios[name](place)
        torch.save(result, Path(folder) / f"{name}.{os.environ['RANK']}.pt")
    if torch.distributed.is_initialized():  # threads that its destructor finds running would abort the process
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
