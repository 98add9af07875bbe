"""Which tests run, and in which order. Fixtures and settings are in `settings.py`."""

import os
from collections import Counter
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands tests to workers ("dsession") does without what tests import: workers begin earlier."""
    if not config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.import_plugin("settings")


LONGEST = (
    "test_faults.py", "test_operations.py", "test_prefix_store.py", "test_samples.py", "test_scripts.py",
    "test_exactness.py", "test_replays.py", "test_drafts.py", "test_fork.py", "test_failed_steps.py",
    "test_extending.py", "test_gpu_check.py", "test_families.py", "test_cli.py", "test_reasons.py", "test_enable.py",
    "test_released.py", "test_properties.py", "test_docs.py",
    "test_interruptions.py", "test_forged.py", "test_limits.py", "test_pairs.py", "test_processes.py", "test_names.py",
)  # fmt: skip
"""Files that take longest, or few of whose tests take long, begin, in an order in which workers do not compile the same
kernels at the same time."""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow; skip tests marked `gpu` without a CUDA device, and those of one memory with models on one.

    Of a test that is marked `one_in(n)` every n-th case is quick. On a device, real or imitated, all of them are.
    """
    import torch

    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    one_memory = pytest.mark.skip(reason="one memory is for models on the CPU")
    on_cpu = os.environ.get("HF_OFFLOAD_TEST_DEVICE", "cpu") == "cpu"
    cases: Counter[str] = Counter()
    quick = 0
    for item in items:
        thinned = item.get_closest_marker("one_in")
        if thinned and on_cpu and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            else:
                quick += 1
            cases[name] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("tier") == "one" and not on_cpu:
            item.add_marker(one_memory)
    if cases:
        items[0].config.stash[SAMPLED] = f"{quick} of {cases.total()} cases that are much alike are quick: `one_in`"
    tests = Counter(item.path for item in items)
    first = {name: i for i, name in enumerate(LONGEST)}
    # Workers take files in this order.
    items.sort(key=lambda item: (first.get(item.path.name, len(first)), -tests[item.path]))


SAMPLED = pytest.StashKey[str]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it has sampled."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sampled"] = session.config.stash.get(SAMPLED, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SAMPLED] = getattr(node, "workeroutput", {}).get("sampled", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if told := config.stash.get(SAMPLED, ""):
        terminalreporter.write_line(told)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker that has reported its tests ends at once: to free what compiled kernels leave takes seconds."""
    if hasattr(config, "workerinput"):
        os._exit(0)
