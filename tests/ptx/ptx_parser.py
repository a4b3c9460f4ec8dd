"""Translate PTX into the lines that core.cpp reads.

Registers are numbered; labels and parameters are resolved.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

SHARED_BASE = 1024
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


class Parameter(NamedTuple):
    """A kernel parameter and its place in the parameter block, bytes."""

    kind: str  # u64, f32, …
    pointer: bool
    offset: int
    size: int


class Parsed(NamedTuple):
    """A kernel as core.cpp reads it, with the origin of each instruction."""

    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    rows: list[str]  # one instruction each, as core.cpp reads it
    registers: int
    text: list[str]  # the instruction in the PTX
    ptx_lines: list[int]
    sources: list[str]  # file:line:column in Python


_LOC = re.compile(r"\.loc\b.*?//\s*(\S+)")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_TOKEN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


def parse(ptx: str) -> Parsed:
    """Parse the PTX of one kernel."""
    lines = ptx.splitlines()
    head = next(i for i, line in enumerate(lines) if ".entry" in line)
    body = next(i for i in range(head, len(lines)) if lines[i].startswith("{"))
    name = re.search(r"\.entry\s+(\w+)", lines[head])[1]
    parameters: list[Parameter] = []
    places: dict[str, int] = {}
    offset = 0
    for line in lines[head:body]:
        found = re.search(r"\.param\s+\.([a-z])(\d+)\s+(.*?)(\w+_param_\d+)", line)
        if found:
            size = SIZES[found[2]]
            offset = -(-offset // size) * size
            places[found[4]] = offset
            parameters.append(Parameter(found[1] + found[2], ".ptr" in found[3], offset, size))
            offset += size
    slots: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    labels: dict[str, int] = {}
    statements: list[tuple[str, int, str]] = []
    pending = ""
    source = ""
    depth = 0
    for number in range(body, len(lines)):
        line = lines[number]
        where = _LOC.search(line)
        if where:
            source = where[1]
        line = line.split("//")[0].strip()
        if not line or line.startswith((".loc", ".section", ".file", ".pragma")):
            continue
        while True:
            label = re.match(r"(\$?[\w$]+):\s*", line)
            if not label:
                break
            labels[label[1]] = len(statements)
            line = line[label.end() :]
        if line == "{":
            depth += 1
            scopes.append({})
            continue
        if line == "}":
            depth -= 1
            scopes.pop()
            if depth == 0:
                break
            continue
        pending += " " + line
        while ";" in pending:
            statement, pending = pending.split(";", 1)
            statement = statement.strip()
            if statement.startswith(".reg"):
                names = statement.split(None, 2)[2]
                if "<" not in names and depth > 1:
                    for each in names.split(","):
                        scopes[-1][each.strip()] = f"{each.strip()}@{number}"
            elif statement.startswith("."):
                raise ValueError(f"unknown directive: {statement}")
            elif statement:
                for scope in scopes[1:]:
                    for old, new in scope.items():
                        statement = re.sub(
                            rf"(?<![\w%$.]){re.escape(old)}(?![\w@])", new, statement
                        )
                statements.append((statement, number + 1, source))

    def slot(register: str) -> str:
        return str(slots.setdefault(register, len(slots)))

    def number_of(x: str) -> int | None:
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", x):
            return int(x[2:], 16)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", x):
            return int(x[2:], 16)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", x):
            return int(x.rstrip("U"), 0) & (2**64 - 1)
        if re.fullmatch(r"-?\d+\.\d+", x):
            return struct.unpack("<I", struct.pack("<f", float(x)))[0]
        return {"global_smem": SHARED_BASE, "WARP_SZ": 32}.get(x)

    def operand(x: str) -> str:
        x = x.strip()
        if x == "_":
            return "_"
        if x.startswith("["):
            inner = x[1:-1].replace(" ", "")
            base, _, plus = inner.partition("+")
            shift = int(plus, 0) if plus else 0
            if base in places:
                return f"m-1:{places[base] + shift}"
            value = number_of(base)
            if value is not None:
                return f"m-1:{value + shift}"
            return f"m{slot(base)}:{shift}"
        if x in labels:
            return f"L{labels[x]}"
        if x.startswith(("%tid", "%ctaid", "%nctaid", "%ntid", "%laneid", "%warpid", "%cluster")):
            return f"s{x}"
        value = number_of(x)
        if value is not None:
            return f"i{value:x}"
        if "|" in x:
            return ",".join("r" + slot(each.strip()) for each in x.split("|"))
        return "r" + slot(x)

    rows, text, ptx_lines, sources = [], [], [], []
    for statement, number, where in statements:
        guard = _GUARD.match(statement)
        rest = statement[guard.end() :] if guard else statement
        predicate = "-" if not guard else guard[1] + slot(guard[2])
        opcode, *more = re.split(r"\s+", rest, maxsplit=1)
        tokens = []
        for token in _TOKEN.findall(more[0] if more else ""):
            token = token.strip()
            if token.startswith("{"):
                tokens.append("{" + ",".join(operand(x) for x in token[1:-1].split(",")))
            else:
                tokens.append(operand(token))
        rows.append("\t".join((str(number), predicate, opcode, " ".join(tokens))))
        text.append(statement)
        ptx_lines.append(number)
        sources.append(where)
    return Parsed(name, parameters, offset, rows, len(slots), text, ptx_lines, sources)
