"""Processes that begin with vLLM imported are else what fresh ones are: other tests rest on it."""

import os

import pytest

from tests import warm

LOOK = """
import multiprocessing, os, sys
assert "vllm" in sys.modules and len(os.listdir("/proc/self/task")) == 1
print(sys.argv[1:], __name__, os.environ.get("ONLY_HERE"), os.getcwd(), len(os.listdir("/proc/self/fd")) - 1)
print([name for name in sys.modules if name.startswith(("vllm_specrollout", "bench", "tests"))], file=sys.stderr)
"""


def test_a_program_finds_its_arguments_files_and_environment_and_nothing_of_ours(tmp_path):
    done = warm.run(["-c", LOOK, "a", "b"], {"ONLY_HERE": "1"}, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"['a', 'b'] __main__ 1 {tmp_path} 3\n")
    assert done.stderr == "[]\n"


def test_a_file_is_run_as_the_main_module_beside_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    (tmp_path / "own.py").write_text("import neighbour\nprint(neighbour.NAME, __file__)")
    assert warm.run([str(tmp_path / "own.py")], os.environ).stdout == f"neighbour {tmp_path / 'own.py'}\n"
    done = warm.run(["-P", str(tmp_path / "own.py")], os.environ)
    assert done.returncode == 1 and "No module named 'neighbour'" in done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_process_ends_with_its_own_status(code, status):
    assert warm.run(["-c", code], os.environ).returncode == status


COUNT = """
import multiprocessing, os, sys
from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess

def ends():
    Counter("ended", "", registry=CollectorRegistry()).inc()

os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
process = multiprocessing.get_context("spawn").Process(target=ends)
process.start()
process.join()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_what_its_processes_count_together_is_found_as_of_a_server_with_several_front_ends(tmp_path):
    assert "ended_total 1.0" in warm.run(["-c", COUNT, str(tmp_path)], os.environ).stdout
