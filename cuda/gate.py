#!/usr/bin/env python3
"""Compiles every kernel of this folder with nvcc, prints what each takes of a multiprocessor, and fails on what costs speed in
silence: spills, local memory, warnings (among them ptxas' C7514 and C7519, which say that wgmma was serialised).

    python3 cuda/gate.py [FILE.cu ...]      # nvcc from $CUDA_HOME/bin or PATH

Kernels that may use local memory stand in ALLOWED with the reason.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# As the build compiles them (build.rs reads the same file), and with a report.
FLAGS = [*(Path(__file__).parent / "nvcc.flags").read_text().split(), "-Xptxas", "-v,-warn-spills"]

# kernel: why it may spill or have a stack frame
ALLOWED: dict[str, str] = {}

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
WARNING = re.compile(r"\bwarning\b|C7514|C7519", re.IGNORECASE)
SPILLED = re.compile(r"Registers are spilled to local memory in function '(\w+)'")


def compile_file(nvcc: str, source: Path, folder: Path) -> tuple[Path, str]:
    """The compiler's report on one file, whose code lands in `folder`. Exits if it does not compile."""
    output = folder / f"{source.stem}.fatbin"
    command = [nvcc, *FLAGS, "-o", str(output), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    report = result.stdout + result.stderr
    if result.returncode != 0:
        sys.exit(f"gate: {source.name} does not compile\n{report}")
    return output, report


def launch_shapes(cuobjdump: str | None, fatbin: Path) -> dict[str, tuple[int, int]]:
    """Threads per block and bytes of shared memory of each kernel, from its NAME_launch (include/device.h)."""
    if cuobjdump is None:
        return {}
    command = [cuobjdump, "-ptx", str(fatbin)]
    ptx = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shapes = {}
    for name, values in re.findall(r"(\w+)_launch\[\d+\] = \{([^}]*)\}", ptx):
        content = bytes(int(value) for value in values.split(","))
        content += bytes(16 - len(content))  # PTX leaves out zeros at the end
        threads, shared_bytes = (int.from_bytes(content[at : at + 4], "little") for at in (0, 4))
        shapes[name] = (threads, shared_bytes)
    return shapes


def read_report(report: str) -> tuple[list[tuple], list[str]]:
    """Rows (kernel, architecture, registers, stack, spilled bytes) and the lines that are warnings."""
    rows, warnings, spilled = [], [], []
    kernel = architecture = ""
    frame = (0, 0)
    for line in report.splitlines():
        if match := ENTRY.search(line):
            kernel, architecture = match.groups()
        elif match := FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            frame = (stack, stores + loads)
        elif match := USED.search(line):
            rows.append((kernel, architecture, int(match[1]), *frame))
        elif match := SPILLED.search(line):
            spilled.append((match[1], line))
        elif WARNING.search(line):
            warnings.append(line)
    # A spill in a kernel shows in its row; one in a function that a kernel calls shows only here.
    kernels = {row[0] for row in rows}
    return rows, warnings + [line for function, line in spilled if function not in kernels]


def tool(name: str) -> str | None:
    home = os.environ.get("CUDA_HOME")
    path = Path(home) / "bin" / name if home else None
    return str(path) if path and path.exists() else shutil.which(name)


def main() -> None:
    nvcc = tool("nvcc")
    if nvcc is None:
        sys.exit("gate: no nvcc in $CUDA_HOME/bin or PATH")
    here = Path(__file__).resolve().parent
    sources = [Path(name) for name in sys.argv[1:]] or sorted(here.glob("*.cu"))
    if not sources:
        sys.exit(f"gate: no kernels in {here}")

    failures = []
    seen = set()
    print(f"{'kernel':<32}{'target':<10}{'registers':>10}{'threads':>9}{'shared':>9}{'stack':>7}{'spilled':>9}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for output, report in pool.map(lambda source: compile_file(nvcc, source, Path(folder)), sources):
            shapes = launch_shapes(tool("cuobjdump"), output)
            rows, warnings = read_report(report)
            failures += [f"{output.stem}.cu: {line.strip()}" for line in warnings]
            for kernel, architecture, registers, stack, spilled in sorted(rows):
                threads, shared_bytes = shapes.get(kernel, ("-", "-"))
                shared_bytes = 0 if shared_bytes == 1 else shared_bytes  # NoShared is empty, but C++ gives it a byte
                print(f"{kernel:<32}{architecture:<10}{registers:>10}{threads:>9}{shared_bytes:>9}{stack:>7}{spilled:>9}")
                seen.add(kernel)
                if (stack or spilled) and kernel not in ALLOWED:
                    failures.append(f"{output.stem}.cu: {kernel} for {architecture}: {spilled} bytes spilled, {stack} of stack")
    if len(sys.argv) == 1:
        failures += [f"ALLOWED names {kernel}, which is no kernel" for kernel in ALLOWED if kernel not in seen]
    if failures:
        sys.exit("gate: failed\n" + "\n".join(failures))
    print(f"gate: {len(seen)} kernels, no spills, no local memory, no warnings")


if __name__ == "__main__":
    main()
