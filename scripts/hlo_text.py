"""Reading of compiled programs as XLA prints them: instructions, what they move, and the largest copies among them.

Only what runs counts: the entry computation and what it calls, loops and branches once each, as XLA's own cost analysis
does it. What is inside a fusion is no instruction of its own.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_MOVES_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "opt-barrier",
}
_COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"}
_SLICES = {"dynamic-slice", "gather", "slice"}  # of their first operand they read what they return


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: name within its computation.
      opcode: such as "fusion" or "copy-start".
      shape: type of the result, with its layout.
      operands: names of the operands.
      rest: everything behind the operands: attributes and metadata.
      root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        found = re.findall(r"(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation)="
                           r"(\{[^}]*\}|%?[\w.\-]+)", self.rest)
        return tuple(name for text in found for name in re.findall(r"[\w.\-]+", text))

    @property
    def op_name(self) -> str:
        """The JAX operation it was made for; empty if unknown."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    @property
    def frame(self) -> int | None:
        """Number of its stack frame in the program's tables; None = not told."""
        match = re.search(r"stack_frame_id=(\d+)", self.rest)
        return int(match[1]) if match else None


def parts_of(shape: str) -> list[str]:
    """Returns the arrays in a type, which may be a tuple, each with its layout."""
    return re.findall(r"\w+\[[\d,<=]*\](?:\{[^}]*\})?", re.sub(r"/\*.*?\*/", "", shape))


def nbytes(shape: str) -> int:
    """Returns the bytes of the numbers in a type, without what a layout adds to them."""
    return sum(_array_bytes(part) for part in parts_of(shape))


def _array_bytes(part: str) -> int:
    kind, sizes = re.match(r"(\w+)\[([\d,<=]*)\]", part).groups()
    count = math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    bits = _BITS.get(kind)
    if bits is None:
        match = re.match(r"[a-z]+(\d+)", kind)
        if match is None:
            raise ValueError(f"the program has numbers of an unknown type {kind!r}; scripts/hlo_text.py knows no size")
        bits = int(match[1])
    return -(-count * bits // 8)


def nbytes_off_chip(shape: str) -> int:
    """Returns the bytes of a type as `nbytes` does, without arrays in on-chip memory, S(1) on a TPU."""
    return sum(_array_bytes(part) for part in parts_of(shape) if "S(1)" not in part)


def _layout(part: str) -> str:
    """Returns the layout of an array without its memory space."""
    match = re.search(r"\{(.*)\}", part)
    return re.sub(r"S\(\d+\)", "", match[1]) if match else ""


class Program:
    """A compiled program, parsed from its text.

    Attributes:
      computations: instructions of each computation, by name, in order.
      entry: name of the computation that runs.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._tables(text)
        current: dict[str, Instruction] | None = None
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif current is not None and (made := _instruction(line)):
                current[made.name] = made
        if not self.entry:
            raise ValueError("the text has no ENTRY; it is not a compiled program as XLA prints it")

    def _tables(self, text: str) -> None:
        """Reads the tables of files, places and stack frames at the head of the text."""
        files = dict(re.findall(r'^(\d+) "(.*\.py|<.*>)"$', text, re.M))
        places = re.findall(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", text, re.M)
        frames = re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", text, re.M)
        self._places = {int(number): (files.get(file, "?"), int(line)) for number, file, line in places}
        # Parents are counted from 1, and 1 is none.
        self._frames = {int(number): (int(place), int(parent) - 1) for number, place, parent in frames}

    def stack(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Returns (file, line) of each call that led to an instruction, innermost first; empty if unknown."""
        found, number = [], instruction.frame
        while number in self._frames:
            place, parent = self._frames[number]
            found.append(self._places[place])
            if parent == number:
                break
            number = parent
        return found

    def reason(self, instruction: Instruction) -> Instruction:
        """Returns the instruction that tells why another one is there.

        It is itself if JAX asked for it. What XLA added, such as a copy into another layout, is there for the first
        one that takes its result and was asked for, or else for the one that its operand comes from.
        """
        for others in (self._users, self._operands):
            todo, known = [instruction], {instruction.name}
            while todo:
                current = todo.pop(0)
                if self.stack(current):
                    return current
                new = [other for other in others.get(current.name, ()) if other.name not in known]
                known.update(other.name for other in new)
                todo += new
        return instruction

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        """Instructions that run and take a result, by its name."""
        users: dict[str, list[Instruction]] = {}
        for _, instruction in self.running:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users

    @functools.cached_property
    def _operands(self) -> dict[str, list[Instruction]]:
        """Instructions that an instruction takes the results of, by its name."""
        named = {instruction.name: instruction for _, instruction in self.running}
        return {name: [named[operand] for operand in instruction.operands if operand in named]
                for name, instruction in named.items()}

    @functools.cached_property
    def running(self) -> list[tuple[str, Instruction]]:
        """Instructions that run by themselves, each with its computation: not those inside of fusions."""
        todo, known, found = [self.entry], {self.entry}, []
        while todo:
            name = todo.pop()
            for instruction in self.computations[name].values():
                found.append((name, instruction))
                if instruction.opcode in ("while", "conditional", "call", "async-start"):
                    inner = [each for each in instruction.called if each not in known]
                    known.update(inner)
                    todo += inner
        return found

    def copies(self) -> Iterator[tuple[int, str, Instruction]]:
        """Yields (bytes, shape, instruction) of each copy or transpose of an array.

        These are copies, transposes and fusions that end in one. A copy into on-chip memory that keeps the layout is
        left out: the array is read from there instead.
        """
        for computation, instruction in self.running:
            kind = self._ends_in(instruction)
            if kind not in ("copy", "copy-start", "transpose"):
                continue
            result, *source = parts_of(instruction.shape)
            if kind == "copy" and len(instruction.operands) == 1:
                before = self.computations[computation].get(instruction.operands[0])
                source = parts_of(before.shape)[:1] if before else []
            moved_only = kind != "transpose" and bool(source) and _layout(source[0]) == _layout(result)
            if not (moved_only and "S(1)" in result):
                yield _array_bytes(result), result, instruction

    def _ends_in(self, instruction: Instruction) -> str:
        """Returns the opcode that makes an instruction's result; that of its root, bitcasts aside, for a fusion."""
        if instruction.opcode != "fusion":
            return instruction.opcode
        inside = self.computations[instruction.called[0]]
        last = next(each for each in inside.values() if each.root)
        while last.opcode == "bitcast" and last.operands[0] in inside:
            last = inside[last.operands[0]]
        return last.opcode

    def exchanges(self) -> list[dict]:
        """Returns kind, shape and bytes of each array that devices exchange; one that combines arrays counts each."""
        found = []
        for _, instruction in self.running:
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                parts = parts_of(instruction.shape)
                both = instruction.opcode.endswith("-start") and kind != "all-reduce"  # operands, then results
                found += [{"kind": kind, "shape": part.split("{")[0], "bytes": nbytes(part)}
                          for part in parts[len(parts) // 2 if both else 0 :]]
        return found

    def launches(self) -> int:
        """Returns how many instructions run by themselves, each a kernel or a copy on a GPU; those of a loop once."""
        return sum(each.opcode not in _MOVES_NOTHING and not each.opcode.endswith(("-done", "-update"))
                   for _, each in self.running)

    def largest_copy(self) -> tuple[int, str]:
        """Returns bytes and shape of the largest copy or transpose of an array; (0, "") if there is none."""
        return max(((size, shape) for size, shape, _ in self.copies()), default=(0, ""))

    def costs(self, size: Callable[[str], int] | None = None) -> list[tuple[int, Instruction]]:
        """Returns instructions with the bytes they move, by an estimate from their shapes, most first.

        An estimate is result and operands, once each. Of an operand that is only sliced or gathered from, it is what is
        taken; of one that is updated in place, what is written. A Pallas kernel counts what its `cost_estimate` says.

        Args:
          size: bytes of an array, given its shape and layout; None = `nbytes`. `nbytes_off_chip` leaves out what is in
            on-chip memory.
        """
        size = nbytes if size is None else size
        found = [(self._moved(self.computations[name], each, size), each) for name, each in self.running]
        return sorted(found, key=lambda pair: -pair[0])

    def _moved(self, around: dict[str, Instruction], instruction: Instruction, size: Callable[[str], int]) -> int:
        opcode, result = instruction.opcode, parts_of(instruction.shape)
        if opcode in _MOVES_NOTHING or opcode.endswith(("-done", "-update")) or "ConcatBitcast" in instruction.rest:
            return 0
        told = re.search(r'bytes_accessed\\*"\s*:\s*\\*"?(\d+)', instruction.rest)
        if opcode == "custom-call" and told:
            return int(told[1])
        each = re.search(r'bytes_accessed_by_each\\22: \\22(\d+)', instruction.rest)
        if each:  # a kernel by Triton, whose attributes have the numbers of its programs
            return int(each[1]) * math.prod(map(int, re.findall(r"grid_[xyz] = (\d+)", instruction.rest)))
        if opcode == "copy-start":
            return sum(map(size, result[:2]))
        operands = [size(around[name].shape) if name in around else 0 for name in instruction.operands]
        if opcode == "slice-start":
            taken = nbytes(result[1])
            return size(result[1]) + min(taken, operands[0])
        if opcode.endswith("-start"):
            return 0  # what it starts is counted by itself
        if opcode in _SLICES:
            return size(instruction.shape) + min(nbytes(instruction.shape), operands[0]) + sum(operands[1:])
        if opcode == "dynamic-update-slice":
            return min(operands[0], nbytes(around[instruction.operands[1]].shape)) + sum(operands[1:])
        if opcode == "fusion":
            return self._moved_by_fusion(instruction, operands, size)
        return size(instruction.shape) + sum(operands)

    def _moved_by_fusion(self, instruction: Instruction, operands: list[int], size: Callable[[str], int]) -> int:
        inside = self.computations[instruction.called[0]]
        in_place = {each.operands[0]: each for each in inside.values()
                    if each.opcode in ("dynamic-update-slice", "scatter")}
        total, written = 0, size(instruction.shape)
        for each in (one for one in inside.values() if one.opcode == "parameter"):
            read = operands[int(each.rest)]
            names, users = _users_within(inside, each.name)
            if each.name in in_place and len(users) == 1:
                update = in_place[each.name]
                changed = inside[update.operands[-1 if update.opcode == "scatter" else 1]]
                written += nbytes(changed.shape) - nbytes(update.shape)
                continue
            if users and all(one.opcode in _SLICES and one.operands[0] in names for one in users):
                read = min(read, sum(nbytes(one.shape) for one in users))
            total += read
        return total + max(written, 0)


def _users_within(inside: dict[str, Instruction], name: str) -> tuple[set[str], list[Instruction]]:
    """Returns the names that an array has within a fusion, bitcasts of it included, and what takes it."""
    names, users = {name}, []
    for one in inside.values():  # operands come first
        if names.intersection(one.operands):
            if one.opcode == "bitcast":
                names.add(one.name)
            else:
                users.append(one)
    return names, users


def _instruction(line: str) -> Instruction | None:
    """Returns the instruction in a line, or None if there is none."""
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    at = match.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    opcode = re.match(r" ?([\w\-]+)\(", line[end:])
    if opcode is None:
        return None
    first = end + opcode.end()
    last = _closing(line, first - 1)
    given = line[first:last]
    rest = given if opcode[1] == "parameter" else line[last + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", given))
    return Instruction(match[2], opcode[1], line[at:end], operands, rest, bool(match[1]))


def _closing(line: str, at: int) -> int:
    """Returns the index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no bracket closes the one at {at} of {line[:200]!r}")
