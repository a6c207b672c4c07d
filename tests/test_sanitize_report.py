"""What of racecheck's report `make sanitize` lets pass: tests/gpu/sanitize.py."""

import pytest
from gpu.sanitize import CONTROL, KERNELS, LAST_WORDS, PROGRAM, dispatches, judge

HOPPER = """
@gluon.jit
def _consumer(shared):
    z = logits(shared)


@gluon.jit
def _sum_kernel(E):
    shared = shared_memory(E)
    gl.warp_specialize(
        [(_consumer, (shared,)), (produce, (E, shared))],
        [1],
        [40],
    )
"""  # a kernel whose def is line 8, its dispatch lines 10 to 14
PLAIN = "\n" * 11 + "@triton.jit\ndef {}(E):\n    z = tl.zeros((16,))\n"  # its lines 13 and 14 hold code
SOURCES = [("sums.py", HOPPER), (PROGRAM.name, PROGRAM.read_text())]
CONTROL_LINE = min(line for _, name, line in dispatches(SOURCES) if name == PROGRAM.name)


def record(kernel, file, *lines):
    first, *others = lines
    text = f"========= Error: Race reported between Read access at {kernel}+0x110 in {file}:{first}\n"
    return text + "".join(
        f"=========     and Write access at {kernel}+0x1aed0 in {file}:{line} [25 hazards]\n" for line in others
    )


def report(*records, last=LAST_WORDS, displayed=None):
    displayed = len(records) if displayed is None else displayed
    return (
        "========= \n".join(records)
        + f"{last}\n========= RACECHECK SUMMARY: {displayed} hazards displayed (1 errors, 0 warnings)\n"
    )


def counts(*records, sources=SOURCES, **options):
    return [len(part) for part in judge(report(*records, **options), sources)]


CONTROLLED = record(CONTROL, PROGRAM.name, CONTROL_LINE, CONTROL_LINE)


def test_only_accesses_in_the_dispatch_pass():
    assert counts() == [0, 0]
    assert counts(CONTROLLED, record("_sum_kernel", "sums.py", 10, 14, 12)) == [0, 2]
    assert counts(CONTROLLED, record("_sum_kernel", "a/b/sums.py", 8, 8, 14)) == [0, 2]
    assert counts(CONTROLLED, record("_sum_kernel", "sums.py", 10, 9)) == [1, 1]
    assert counts(CONTROLLED, record("_sum_kernel", "sums.py", 4, 10)) == [1, 1]
    assert counts(CONTROLLED, record("_sum_kernel", "other.py", 10, 10)) == [1, 1]
    assert counts(CONTROLLED, record("_other_kernel", "sums.py", 10, 10)) == [1, 1]


def test_without_the_control_all_count():
    assert counts(record("_sum_kernel", "sums.py", 10, 14)) == [1, 0]


@pytest.mark.parametrize("function,count", [("_sum_kernel", 1), ("log1p", 1), ("_tokens_kernel", 0)])
def test_a_line_that_may_be_the_kernels_code_in_a_file_of_the_same_name_counts(function, count):
    sources = [*SOURCES, ("sums.py", PLAIN.format(function))]
    assert counts(CONTROLLED, record("_sum_kernel", "sums.py", 10, 12), sources=sources) == [0, 2]
    assert counts(CONTROLLED, record("_sum_kernel", "sums.py", 10, 14), sources=sources) == [count, 2 - count]


def test_all_dispatches_of_ours_can_be_told():
    """No other file of their name has code in their lines."""
    sources = [(path.name, path.read_text()) for path in KERNELS]
    apart = set().union(*(dispatches([source]) for source in sources))
    assert dispatches(sources) == apart and len({kernel for kernel, _, _ in apart}) == 6


def test_records_of_another_form_count():
    of_hazard = "========= Error: Potential RAW hazard detected at __shared__ 0x435 in block (4,0,0) :\n"
    assert counts(CONTROLLED, of_hazard) == [1, 1]


@pytest.mark.parametrize("broken", [dict(last="Traceback"), dict(displayed=3)])
def test_a_report_that_is_not_whole_is_refused(broken):
    with pytest.raises(ValueError, match="did not come to its end"):
        counts(CONTROLLED, **broken)
