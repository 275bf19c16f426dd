from __future__ import annotations

import pytest

from rollwire.cli.import_roll.devices import MAX_DEVICES, device_list


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,8))", list(range(8))),
        ("list(range(4, 8))", [4, 5, 6, 7]),
        ("range(3)", [0, 1, 2]),
        ("list(range(0,8,2))", [0, 2, 4, 6]),
        ("[0, 3]", [0, 3]),
        ([0, 3], [0, 3]),
        ("(1, 2)", [1, 2]),
        ("list(range(0,2)) + [7]", [0, 1, 7]),
        ("[]", []),
    ],
)
def test_lists_of_devices_are_read(text: object, devices: list[int]) -> None:
    assert device_list(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getpid()",
        "list(range(open('x')))",
        "[i for i in range(8)]",
        "list(range(10**9))",
        f"list(range({MAX_DEVICES + 1}))",
        f"list(range({MAX_DEVICES})) + list(range({MAX_DEVICES}))",
        "list(range(0, 8, 0))",
        "range()",
        "[True]",
        "[-1]",
        "[1.5]",
        "list(map(int, [1]))",
        "8",
        "list(range(0,8)",
        "",
        "(" * 500 + ")" * 500,
    ],
)
def test_nothing_else_is_and_nothing_is_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices|arg 3"):
        device_list(text)
