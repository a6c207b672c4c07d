"""`make sanitize`: tests/gpu/sanitized.py under compute-sanitizer's memcheck and racecheck. Not a test module.

Triton hands specialized warps their work in a word of shared memory, between barriers of all of a program's warps. In a kernel that
has an mbarrier, racecheck does not see that these barriers order the word's accesses, also where the kernel does nothing else:
sanitized.py begins with such a one. Records whose accesses all lie in a dispatch, where no kernel of ours reads or writes shared
memory, do not count, as long as racecheck reports that one, too.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/gpu/sanitized.py"
KERNELS = [PROGRAM, *sorted((ROOT / "cce/kernels").rglob("*.py"))]  # where its kernels are
LAST_WORDS = "every kernel ran"  # of PROGRAM
CONTROL = "_dispatch_kernel"  # its first kernel
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (?:\S*/)?(\S+):(\d+)")


def dispatches(sources: list[tuple[str, str]]) -> set[tuple[str, str, int]]:
    """(kernel, file name, line) of what a kernel's dispatch is said to lie in: the line of its def, the lines of its call of
    warp_specialize.

    Not of lines that in another file of that name hold code that may be the kernel's: its own or that of a function without "kernel"
    at the end of its name. sources: (file name, text).
    """
    found, code = set(), set()
    for name, text in sources:
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            of_dispatch = {
                line
                for call in calls
                if getattr(call.func, "attr", None) == "warp_specialize"
                for line in (function.lineno, *range(call.lineno, call.end_lineno + 1))
            }
            found |= {(function.name, name, line) for line in of_dispatch}
            kernel = function.name if function.name.endswith("kernel") else None
            code |= {
                (kernel, name, line)
                for line in range(function.lineno, function.end_lineno + 1)
                if line not in of_dispatch
            }
    return {place for place in found if place not in code and (None, *place[1:]) not in code}


def judge(report: str, sources: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """racecheck's records (that count, that do not). ValueError where the report is not whole."""
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", report)
    records = re.findall(r"^========= (?:Error|Warning): .*(?:\n=========  +and .*)*", report, re.MULTILINE)
    if LAST_WORDS not in report or summary is None or int(summary[1]) != len(records):
        raise ValueError("racecheck, or the program under it, did not come to its end")
    places = dispatches(sources)

    def of_dispatch(record: str) -> bool:
        accesses = [ACCESS.search(line) for line in record.splitlines()]
        return all(access and (access[1], access[2], int(access[3])) in places for access in accesses)

    excused = [record for record in records if of_dispatch(record)]
    if not any(CONTROL in record for record in excused):
        excused = []
    return [record for record in records if record not in excused], excused


def start(tool: str) -> tuple[subprocess.Popen, IO[str]]:
    """The tool at work, and the file that gets what is said."""
    said = tempfile.TemporaryFile("w+")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, str(PROGRAM)]
    return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT), said


def main() -> int:
    reports = []
    for process, said in [start(tool) for tool in ("memcheck", "racecheck")]:  # side by side: they take minutes
        process.wait()
        said.seek(0)
        reports.append((process.returncode, said.read()))
        print(reports[-1][1], flush=True)
    (status, _), (_, report) = reports
    count, excused = judge(report, [(path.name, path.read_text()) for path in KERNELS])
    print(f"racecheck: {len(count)} records count; {len(excused)} of the dispatch of specialized warps do not")
    return int(status != 0 or bool(count))


if __name__ == "__main__":
    sys.exit(main())
