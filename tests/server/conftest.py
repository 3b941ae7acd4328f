# SPDX-License-Identifier: Apache-2.0
"""Servers for tests: one for each family, which all tests of a session share, and others that a test may kill."""

import pytest

from tests.server.checkpoints import save_checkpoint
from tests.server.environment import rollout_server, show_logs


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """Folder of the tiny checkpoint of a family, a key of `SERVED`."""
    folders = {}

    def folder(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("checkpoints") / family
            save_checkpoint(family, folders[family])
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def shared_servers(checkpoint_of, tmp_path_factory):
    servers = {}

    def server(family, *flags):
        if (family, flags) not in servers:
            log = tmp_path_factory.mktemp("server") / f"{family}.log"
            servers[family, flags] = rollout_server(checkpoint_of(family), log, *flags).start()
        return servers[family, flags]

    yield server
    for one in servers.values():
        one.stop()


@pytest.fixture
def server_of(shared_servers, request):
    """
    `server_of(family, *flags)` is a healthy server that other tests use too, and that is held while no test uses it;
    its log is shown when a test fails.
    """
    used = []

    def server(family, *flags):
        used.append(shared_servers(family, *flags))
        used[-1].resume()
        return used[-1]

    yield server
    for one in used:
        one.pause()
    show_logs(request, used)


@pytest.fixture
def start_server(tmp_path, request):
    """`start_server(checkpoint folder, *flags)` is a server of this test alone, which may be killed and restarted."""
    started = []

    def start(checkpoint, *flags, variables=None):
        log = tmp_path / f"server-{len(started)}.log"
        started.append(rollout_server(checkpoint, log, *flags, variables=variables))
        return started[-1].start()

    yield start
    for server in started:
        server.stop()
    show_logs(request, started)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.report_of_call = report
    return report
