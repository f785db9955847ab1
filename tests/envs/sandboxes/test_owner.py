"""Who holds a sandbox: a living holder is never taken for a dead one, a dead one never for its successor."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

from sao_gym.envs.sandboxes.owner import Owner, is_alive, owner, parse_owner

PRINT_AND_WAIT = "from sao_gym.envs.sandboxes.owner import owner; print(owner(), flush=True); input()"


def test_an_owner_survives_writing_and_reading() -> None:
    assert parse_owner(str(owner())) == owner()
    for text in ("", "a/b/c/d/e", "1234", "a/b/c/1", "a/b/c/-1/2", "a/b/c/1/2/3"):
        assert parse_owner(text) is None


def test_a_process_is_alive_until_it_is_killed_even_while_nobody_has_collected_it() -> None:
    command = [sys.executable, "-c", PRINT_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        other = parse_owner(child.stdout.readline().strip())
        assert other is not None
        assert is_alive(other)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(other)  # a zombie
    assert not is_alive(other)


def test_a_process_id_that_is_used_again_is_another_owner() -> None:
    assert not is_alive(replace(owner(), started=owner().started + 1))
    assert not is_alive(replace(owner(), boot="another"))


def test_what_cannot_be_seen_from_here_counts_as_alive() -> None:
    gone = Owner(machine=owner().machine, boot=owner().boot, space=owner().space, pid=2**22 + 1, started=1)
    assert not is_alive(gone)
    assert is_alive(replace(gone, machine="elsewhere"))
    assert is_alive(replace(gone, space="1"))
