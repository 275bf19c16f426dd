"""Runs code from standard input under limits. A program of its own, started by `tool_python` in isolated mode.

Arguments: CPU seconds, bytes of memory, bytes of the largest file. It imports nothing of Rollwire.
"""

import os
import resource
import sys
import traceback


def main() -> int:
    """Sets the limits, then runs the code; returns the exit status."""
    cpu_s, memory_bytes, file_bytes = map(int, sys.argv[1:])
    limits = (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # of no effect for root
    )
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - this program starts often and imports little
        os.dup2(nothing.fileno(), 0)
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 - what the tool is for
    except SystemExit:
        raise
    except BaseException as error:  # shown as the interpreter would, without the frame of this program
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
