"""The mutation score of parts of the package: how many small errors in them the tests notice.

    make coverage    # records which test reaches which line
    make mutation ARGS="keyhole/planner.py keyhole/cache --sample 50"

Cosmic Ray makes the mutants: another operator, number, condition, an empty loop ... The places are
drawn with a fixed seed, and at each place one mutant. All tests are imported once; each mutant then
runs in a fork of this process, in which the changed function has the mutant's code. The fork runs
the tests that reach the changed line, those of the file first, until one fails. A failure counts
only if the same tests pass in a fork without the mutant. What survives is printed.

Mutants that change what runs at import (a constant, a default) are left out. Those that no test
fails in LIMIT seconds count as survivors, and those that hang are counted apart.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

try:  # in .venv-measure alone
    import coverage
    import parso  # noqa: F401  # before Cosmic Ray, which imports a part of it that needs all of it
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
except ImportError:
    if __name__ == "__main__":
        raise

ROOT = Path(__file__).parents[1]
PARTS = ["keyhole/policies", "keyhole/cache", "keyhole/planner.py", "keyhole/engine/allocation.py"]
#: They change how a function is wrapped, or an error's class: not what the code computes.
LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer")
#: CPU seconds for the tests of a mutant; after twice as many, or HANGS seconds, it hangs.
LIMIT, HANGS = 30, 900
#: Plugins of pytest; faulthandler would print the crash of a mutant.
OFF = ("xdist", "cacheprovider", "faulthandler")


@dataclass(frozen=True)
class Mutant:
    """One change: where it stands, and the code of its function before and after."""

    path: Path
    line: int
    text: str
    before: CodeType
    after: CodeType

    def apply(self) -> None:
        """In this process, to all functions made from that code."""
        found = [x for x in gc.get_objects() if type(x) is FunctionType and self._is_of(x)]
        assert found
        for function in found:
            function.__code__ = self.after

    def _is_of(self, function: FunctionType) -> bool:
        code = function.__code__
        return code.co_filename == self.before.co_filename and code == self.before


def mutants(paths: Sequence[Path], seed: int) -> Iterator[Mutant]:
    """In an order by chance, one for each place."""
    chance = random.Random(seed)
    places: dict[tuple[Path, object], list[tuple[str, int]]] = {}
    for path in paths:
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name in plugins.operator_names():
            kind = plugins.get_operator(name)
            if not kind.arguments() and not name.endswith(LEFT_OUT):
                found = (place for node in nodes for place in kind().mutation_positions(node))
                for number, place in enumerate(found):
                    places.setdefault((path, place), []).append((name, number))
    order = list(places.items())
    chance.shuffle(order)
    for (path, place), kinds in order:
        name, number = chance.choice(kinds)
        source = path.read_text()
        changed = mutate_code(source, plugins.get_operator(name)(), number)
        codes = changed and changed_code(source, changed, path)
        if changed and codes:
            line = place[0][0]  # type: ignore[index]
            lines = (each.splitlines()[line - 1].strip() for each in (source, changed))
            yield Mutant(path, line, "  ->  ".join(lines), *codes)


def changed_code(before: str, after: str, path: Path) -> tuple[CodeType, CodeType] | None:
    """`changed_function` of two sources; None where the second is no Python: {**a} with a +a."""
    try:
        return changed_function(*(compile(s, path, "exec") for s in (before, after)))
    except SyntaxError:
        return None


def changed_function(before: CodeType, after: CodeType) -> tuple[CodeType, CodeType] | None:
    """The outermost function that differs; None where what runs at import does, or nothing."""
    if before.co_flags & inspect.CO_OPTIMIZED:
        same = before == after or before.co_freevars != after.co_freevars
        return None if same else (before, after)
    if before.co_code != after.co_code or len(before.co_consts) != len(after.co_consts):
        return None
    for one, other in zip(before.co_consts, after.co_consts, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if found := changed_function(one, other):
                return found
        elif one != other:
            return None
    return None


class Runner:
    """A plugin for pytest that runs mutants where pytest would run the tests."""

    def __init__(self, found: Sequence[Mutant], data: coverage.CoverageData, end: float) -> None:
        self._mutants, self._data, self._end = found, data, end
        self.counts: Counter[str] = Counter()
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the mutants instead of the tests, and says which were killed."""
        items = {item.nodeid: item for item in session.items}
        for mutant in self._mutants:
            if time.monotonic() > self._end:
                print("the time is over")
                break
            tests = [items[name] for name in self._reaching(mutant) if name in items]
            outcome, last = self._outcome(tests, mutant) if tests else ("not reached", 0)
            by = ""
            if outcome == "killed":
                by = f" by {tests[last].nodeid}"
                if self._outcome(tests[: last + 1], None)[0] != "survived":
                    outcome = "fails without a mutant"
            self.counts[outcome] += 1
            place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            print(f"{outcome}{by}: {place}: {mutant.text}", flush=True)
        return True

    def _reaching(self, mutant: Mutant) -> list[str]:
        """Names of tests, those of the file first, then those of the folder."""
        contexts = self._data.contexts_by_lineno(str(mutant.path)).get(mutant.line, [])
        names = sorted({context.rpartition("|")[0] or context for context in contexts} - {""})
        random.Random(0).shuffle(names)
        folder = f"tests/{mutant.path.parent.relative_to(ROOT / 'keyhole')}/"
        return sorted(
            names,
            key=lambda name: (
                mutant.path.stem not in name.partition("::")[0],
                not name.startswith(folder),
            ),
        )

    def _outcome(self, tests: Sequence[pytest.Item], mutant: Mutant | None) -> tuple[str, int]:
        """What happens in a fork, and the number of the test that it happens in."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 2
            try:
                os.setsid()
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                limit = 2 * LIMIT
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
                if mutant is not None:
                    gc.unfreeze()  # tests/conftest.py hides what is there
                    mutant.apply()
                status = self._run(tests, writer)
            finally:
                os._exit(status)
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], HANGS)
        last = int.from_bytes(os.read(reader, 4), "big") if ready else 0
        if not ready:
            os.killpg(child, signal.SIGKILL)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return "hangs" if os.WTERMSIG(status) in (
                signal.SIGXCPU,
                signal.SIGKILL,
            ) else "killed", last
        return ("survived", "killed", "error of this program")[os.WEXITSTATUS(status)], last

    def _run(self, tests: Sequence[pytest.Item], writer: int) -> int:
        start = time.process_time()
        last, self._failed = 0, False
        for number, (test, following) in enumerate(zip(tests, [*tests[1:], None], strict=True)):
            last = number
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if self._failed or time.process_time() - start > LIMIT:
                break
        os.write(writer, last.to_bytes(4, "big"))
        return int(self._failed)


def main() -> None:
    """Prints what survives, and a line with the score."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="files or folders of the package", default=PARTS)
    parser.add_argument("--sample", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=30, help="after which no mutant begins")
    parser.add_argument("--coverage", default=".coverage", help="data with a context for each test")
    asked = parser.parse_args()
    data = coverage.CoverageData(asked.coverage)
    data.read()
    parts = [ROOT / part for part in asked.parts]
    paths = [
        path
        for part in parts
        for path in ([part] if part.is_file() else sorted(part.rglob("*.py")))
    ]
    chosen = list(itertools.islice(mutants(paths, asked.seed), asked.sample))
    os.environ["CI"] = "true"  # the same examples for every mutant
    runner = Runner(chosen, data, time.monotonic() + 60 * asked.minutes)
    options = ["-qq", "-s", "-m", "not slow", *(f"-pno:{name}" for name in OFF)]
    ended = pytest.main(options, plugins=[runner])
    counts = runner.counts
    valid = counts["killed"] + counts["survived"] + counts["not reached"]
    line = {"parts": asked.parts, "seed": asked.seed, "killed": counts["killed"], "of": valid}
    print(json.dumps(line | {"counts": counts}))
    sys.exit(0 if valid else int(ended) or 1)


if __name__ == "__main__":
    main()
