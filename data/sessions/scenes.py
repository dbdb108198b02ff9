"""Scenes of a coding session: what the user asks, what the assistant thinks, does and answers.

A scene appends turns to a script. What tools return is cut from the library's sources as the session has edited them,
and what the assistant claims is read off them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

from library import Function, Module, find_functions, read_module
from script import Action, Script, Turn

LONGER_NAMES = {
    "i": "index", "j": "other", "n": "count", "s": "text", "f": "file", "k": "key", "v": "value", "m": "match",
    "c": "char", "p": "path", "e": "error", "x": "item", "a": "first", "b": "second", "d": "mapping", "t": "kind",
    "r": "result", "l": "length", "w": "wrapper", "fp": "stream", "L": "items",
}  # fmt: skip

NEW_TEST = """\
import unittest

from {module} import {function}


class {case}NoneTest(unittest.TestCase):
    def test_none_is_named(self):
        with self.assertRaisesRegex(TypeError, {argument!r}):
            {function}({nones})


if __name__ == '__main__':
    unittest.main()
"""

TEST_FAILURE = """\
F
{double}
FAIL: test_none_is_named (__main__.{case}NoneTest.test_none_is_named)
{rule}
Traceback (most recent call last):
  File "/home/dev/cpython/{file}", line 8, in test_none_is_named
    with self.assertRaisesRegex(TypeError, {argument!r}):
AssertionError: TypeError not raised

{rule}
Ran 1 test in 0.001s

FAILED (failures=1)"""


def _long(module: Module, low: int, high: int) -> list[Function]:
    return [f for f in module.functions if low <= f.size <= high]


def _pick(script: Script, module: Module, low: int, high: int) -> Function:
    """A function of a size, or the one that comes nearest."""
    fitting = _long(module, low, high)
    if fitting:
        return script.rng.choice(fitting)
    return min(module.functions, key=lambda f: abs(f.size - (low + high) // 2))


def _quote(module: Module, line: int) -> str:
    return f"```python\n{module.lines[line - 1].strip()}\n```"


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def explain(script: Script, module: Module) -> None:
    """How a function works."""
    f = _pick(script, module, 15, 80)
    short = f.name.rpartition(".")[2]
    script.ask(
        f"How does `{f.name}` in Lib/{module.path} work? I need to know when it raises and what it returns.",
        f"Explain {module.name}.{f.name} to me, please. What are the edge cases?",
        f"I'm reading {module.name} and don't understand {f.name}(). Walk me through it.",
        f"what does {short} do in {module.path}, step by step",
    )
    script.reply(
        script.rng.choice((f"I'll find `{short}` first.", f"Let me look at where `{short}` is defined.", "")),
        script.grep(module, rf"def {short}\b|\b{short}\("),
        thought=f"The question is about {f.name} in {module.path}. I should read the definition before I say anything.",
    )
    script.reply(
        "",
        script.read(module, f.first, f.last + 2),
        thought=f"Defined at line {f.first}, {f.size} lines. I'll read all of it.",
    )
    script.reply(
        _explanation(module, f),
        thought=f"It has {len(f.loops)} loops, {len(f.raises)} raise statements and {len(f.returns)} returns.",
    )


def _explanation(module: Module, f: Function) -> str:
    arguments = [f"`{a}`" for a in f.arguments if a not in ("self", "cls")]
    parts = [f"`{f.name}` is defined at `Lib/{module.path}:{f.first}` and is {f.size} lines long."]
    parts.append(f"It takes {_listed(arguments)}." if arguments else "It takes no arguments of its own.")
    if f.summary:
        parts.append(f'Its docstring says: "{f.summary}"')
    text = " ".join(parts)
    if f.loops:
        text += f"\n\nThe work happens in the loop at line {f.loops[0]}:\n\n{_quote(module, f.loops[0])}\n"
    elif f.body <= f.last:
        text += f"\n\nAfter the docstring it begins with line {f.body}:\n\n{_quote(module, f.body)}\n"
    if f.calls:
        text += f"\nOn the way it calls {_listed([f'`{c}`' for c in f.calls[:5]])}."
    for line, exception, condition in f.raises[:3]:
        why = f" if `{condition}`" if condition else ""
        text += f"\n- line {line}: raises `{exception}`{why}"
    if not f.raises:
        text += "\nIt raises nothing itself; exceptions come from what it calls."
    if f.returns:
        values = [f"`{value}` (line {line})" for line, value in f.returns[:3] if len(value) < 60]
        if values:
            text += f"\n\nIt returns {_listed(values)}."
    else:
        text += "\n\nIt has no return value."
    return text


def usages(script: Script, module: Module) -> None:
    """Where a name is used."""
    counts = Counter(c for f in module.functions for c in f.calls if re.fullmatch(r"(?:self\.)?\w{4,}", c))
    name = script.rng.choice([n for n, _ in counts.most_common(6)] or ["isinstance"]).removeprefix("self.")
    in_code = rf"(?:^|[=(\[,:]|\b(?:return|if|not|in|and|or|yield|for|while))\s*(?:[\w.]+\.)?{name}\("
    hits = [(n, line) for n, line in module.grep(in_code) if not line.strip().startswith("#")]
    script.ask(
        f"Where is {name}() called in {module.path}? List the functions.",
        f"find all callers of `{name}` in Lib/{module.path}",
        f"I want to change the signature of {name}. Which places in {module.name} would break?",
    )
    script.reply(
        "",
        script.grep(module, rf"\b{name}\("),
        thought="A search for the name with an opening parenthesis gives the calls.",
    )
    places = Counter(module.where(n) for n, _ in hits[:25])
    rows = "\n".join(f"- `{where}`: {count} call{'s' * (count > 1)}" for where, count in places.items())
    first = f" The first one is at line {hits[0][0]}:\n\n{_quote(module, hits[0][0])}" if hits else ""
    script.reply(f"Calls of `{name}` in `Lib/{module.path}`: {len(hits[:25])}.\n\n{rows}\n{first}".rstrip())


def errors(script: Script, module: Module) -> None:
    """Which exceptions a module raises."""
    rows = [(line, e, c, f.name) for f in module.functions for line, e, c in f.raises]
    script.ask(
        f"Which exceptions can {module.name} raise by itself?",
        f"Make me a list of all `raise` statements in {module.path}, grouped by exception.",
    )
    script.reply(
        script.rng.choice(("I'll search for the raise statements.", "")),
        script.grep(module, r"^\s+raise\b"),
        thought="grep for raise at the start of a statement; then group by class.",
    )
    if not rows:
        script.reply(
            f"None: no function of `Lib/{module.path}` has a `raise` statement. What comes out of it comes from below."
        )
        return
    groups = Counter(e for _, e, _, _ in rows)
    text = f"`raise` statements in functions: {len(rows)}, with {len(groups)} different exceptions.\n"
    for exception, count in groups.most_common(6):
        where = list(dict.fromkeys(name for _, e, _, name in rows if e == exception))[:3]
        text += f"\n- `{exception}` ({count}): in {_listed([f'`{w}`' for w in where])}"
    conditions = [(line, e, c) for line, e, c, _ in rows if c and len(c) < 70][:2]
    for line, exception, condition in conditions:
        text += f"\n\nLine {line} raises `{exception}` if `{condition}`."
    script.reply(text)


def overview(script: Script, module: Module) -> None:
    """What is in a file."""
    script.ask(
        f"Give me a quick overview of Lib/{module.path}.",
        f"I have never seen {module.name}. What's in it, and where would I start reading?",
        f"summarize {module.path}",
    )
    defs = module.grep(r"^(?:class|def) ")
    script.reply(
        "",
        script.run(f"wc -l Lib/{module.path}", f"{len(module.lines)} Lib/{module.path}"),
        script.grep(module, r"^(?:class|def) "),
        thought="Size first, then the top-level definitions.",
    )
    script.reply(
        "",
        script.read(module, 1, 70),
        thought="The head of the file usually says what it is for.",
    )
    biggest = sorted(module.functions, key=lambda f: -f.size)[:3]
    text = f"`Lib/{module.path}` has {len(module.lines)} lines, {len(module.functions)} functions and methods.\n\n"
    text += "\n".join(f"- line {n}: `{line.strip().rstrip(':')}`" for n, line in defs[:10])
    text += f"\n\nThe longest are {_listed([f'`{f.name}` ({f.size} lines, from {f.first})' for f in biggest])}. "
    script.reply(text + f"I would start with `{biggest[0].name}`.")


def document(script: Script, module: Module) -> None:
    """Give a function a docstring."""
    bare = [
        f
        for f in module.functions
        if not f.summary and f.size >= 5 and module.lines[f.body - 2].rstrip().endswith(":")
    ]
    if not bare:
        return errors(script, module)
    f = script.rng.choice(bare)
    short = f.name.rpartition(".")[2]
    script.ask(
        f"`{f.name}` in Lib/{module.path} has no docstring. Add one.",
        f"please document {f.name} in {module.name}, one or two lines",
    )
    script.reply(
        "", script.read(module, f.first, f.last), thought=f"I need to see {f.name} to describe it correctly."
    )
    indent = re.match(r"\s*", module.lines[f.body - 1])[0]
    arguments = [a for a in f.arguments if a not in ("self", "cls")]
    verb = "Return" if f.returns else "Handle"
    subject = {"Return": f"the {short.strip('_').replace('_', ' ')}", "Handle": short.strip("_").replace("_", " ")}[
        verb
    ]
    line = f'{indent}"""{verb} {subject}' + (f" for {', '.join(arguments[:3])}" if arguments else "") + "."
    lines = [line + '"""']
    if f.raises:
        lines = [
            line,
            "",
            f"{indent}Raises {f.raises[0][1]}"
            + (f" if {f.raises[0][2]}." if len(f.raises[0][2]) in range(1, 50) else "."),
            f'{indent}"""',
        ]
    edit = script.edit(module, f.body, f.body, [*lines, module.lines[f.body - 1]])
    script.reply(
        "",
        edit,
        thought=f"It returns {f.returns[0][1]}."
        if f.returns
        else "It works by side effects, so the docstring should say what it changes.",
    )
    script.reply(
        "",
        script.run(f"python -m py_compile Lib/{module.path} && echo ok", "ok"),
        thought="A quick check that the file still compiles.",
    )
    script.reply(f"`{f.name}` now has a docstring:\n\n```python\n" + "\n".join(lines) + "\n```\n\nThe file compiles.")
    module.functions = find_functions(module.text)


def rename(script: Script, module: Module) -> None:
    """Rename a local variable."""
    options = [
        (f, name)
        for f in _long(module, 8, 40)
        for name in f.locals
        if name in LONGER_NAMES
        and name not in f.arguments
        and not re.search(rf"['\"].*\b{name}\b.*['\"]|\b{name}=", "\n".join(module.lines[f.first : f.last]))
    ]
    if not options:
        return usages(script, module)
    f, name = script.rng.choice(options)
    longer = LONGER_NAMES[name]
    if re.search(rf"\b{longer}\b", "\n".join(module.lines[f.first - 1 : f.last])):
        return usages(script, module)
    script.ask(
        f"The variable `{name}` in {f.name} ({module.path}) is hard to read. Call it `{longer}`.",
        f"rename {name} to {longer} inside {module.name}.{f.name}, nowhere else",
    )
    script.reply(
        "",
        script.read(module, f.first, f.last),
        thought=f"Only inside lines {f.first} to {f.last}. I must not touch attributes or longer names.",
    )
    changed = [n for n in range(f.first, f.last + 1) if re.search(rf"(?<![\w.]){name}\b", module.lines[n - 1])]
    low, high = changed[0], changed[-1]
    new = [re.sub(rf"(?<![\w.]){name}\b", longer, line) for line in module.lines[low - 1 : high]]
    script.reply(
        "", script.edit(module, low, high, new), thought=f"{name} occurs on {len(changed)} lines, the first is {low}."
    )
    tests = script.rng.randrange(12, 90)
    suite = f"test_{module.name.split('.')[0]}"
    script.reply("", script.run(f"./python -m unittest test.{suite}", _test_output(script, tests)))
    script.reply(
        f"Done: `{name}` is `{longer}` on {len(changed)} lines of `{f.name}`, and nothing else changed. "
        f"`{suite}` passes, {tests} tests."
    )
    module.functions = find_functions(module.text)


def check_argument(script: Script, module: Module) -> None:
    """Add a check, with a test that fails first."""
    fitting = [
        f
        for f in _long(module, 5, 40)
        if [a for a in f.arguments if a not in ("self", "cls")] and "." not in f.name and f.body > f.first
    ]
    if not fitting:
        return explain(script, module)
    f = script.rng.choice(fitting)
    argument = next(a for a in f.arguments if a not in ("self", "cls"))
    package = module.name
    script.ask(
        f"`{package}.{f.name}(None)` gives a confusing error. Make it a TypeError that names `{argument}`. Add a test.",
        f"Add a check to {f.name} in {module.path}: {argument} must not be None. With a test, run before and after.",
    )
    script.reply(
        "First the function, then a test that shows the problem.",
        script.read(module, f.first, f.last + 1),
        thought="Write the test first, see it fail, then change the function.",
    )
    case = "".join(w.title() for w in f.name.strip("_").split("_"))
    file = f"Lib/test/test_{package.replace('.', '_')}_none.py"
    nones = ", ".join(["None"] * max(1, len(f.arguments)))
    test = NEW_TEST.format(module=package, function=f.name, case=case, argument=argument, nones=nones)
    script.reply(
        "",
        Action("write", path=file, new=test),
        thought=f"All arguments None is enough: the check on {argument} comes first.",
    )
    failure = TEST_FAILURE.format(file=file, case=case, argument=argument, rule="-" * 70, double="=" * 70)
    script.reply("", script.run(f"./python {file}", failure))
    indent = re.match(r"\s*", module.lines[f.body - 1])[0]
    added = [f"{indent}if {argument} is None:", f'{indent}    raise TypeError("{argument} must not be None")']
    script.reply(
        "It fails as expected. Now the check.",
        script.edit(module, f.body, f.body, [*added, module.lines[f.body - 1]]),
        thought=f"The body begins at line {f.body}; the check goes in front of it.",
    )
    script.reply(
        "",
        script.run(
            f"./python {file}",
            ".\n----------------------------------------------------------------------\nRan 1 test in 0.000s\n\nOK",
        ),
    )
    script.reply(
        f"`{f.name}` now raises `TypeError: {argument} must not be None`. "
        f"The new test in `{file}` failed before the change and passes after it."
    )
    module.functions = find_functions(module.text)


def show_diff(script: Script, module: Module) -> None:
    """Show the session's changes."""
    if module.path not in script.edited:
        return overview(script, module)
    script.ask("Show me the diff.", "what did you change so far?", f"git diff for {module.path} please")
    diff = script.diff(module)
    script.reply("", script.run(f"git diff Lib/{module.path}", diff))
    added = sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())
    removed = sum(line.startswith("-") and not line.startswith("---") for line in diff.splitlines())
    script.reply(
        f"One file, {added} line{'s' * (added != 1)} added and {removed} removed, all of it in `Lib/{module.path}`."
    )


def compare(script: Script, module: Module) -> None:
    """Two functions side by side."""
    one, two = script.rng.sample(_long(module, 8, 40), 2) if len(_long(module, 8, 40)) > 1 else module.functions[:2]
    one, two = sorted((one, two), key=lambda f: f.first)
    script.ask(
        f"What is the difference between {one.name} and {two.name} in {module.path}?",
        f"compare `{one.name}` with `{two.name}` ({module.name})",
    )
    script.reply(
        "",
        script.read(module, one.first, one.last),
        script.read(module, two.first, two.last),
        thought="Two short definitions: read both at once.",
    )
    only_one = [c for c in one.calls if c not in two.calls][:4]
    only_two = [c for c in two.calls if c not in one.calls][:4]
    text = (
        f"`{one.name}` (line {one.first}, {one.size} lines) and `{two.name}` (line {two.first}, {two.size} lines):\n"
    )
    for f, only in ((one, only_one), (two, only_two)):
        takes = _listed([f"`{a}`" for a in f.arguments]) if f.arguments else "nothing"
        calls = f"; it alone calls {_listed([f'`{c}`' for c in only])}" if only else ""
        gives = (
            f"; it returns `{f.returns[-1][1]}`"
            if f.returns and len(f.returns[-1][1]) < 60
            else "; it returns nothing"
        )
        text += f"\n- `{f.name}` takes {takes}{calls}{gives}."
    script.reply(text + f"\n\nThe first one starts with:\n\n{_quote(module, one.body)}")


def search_task(script: Script, module: Module) -> None:
    """Hand a search to a subagent."""
    inner = Script(script.rng, [module])
    prompt = (
        f"Find out which functions of Lib/{module.path} call each other. Report file and line for each, no changes."
    )
    inner.turns.append(Turn(user=prompt))
    defs = module.grep(r"^\s*def ")
    inner.reply("", inner.grep(module, r"^\s*def ", 40), thought="All definitions first.")
    f = _pick(script, module, 20, 90)
    inner.reply("", inner.read(module, f.first, f.last))
    own = {g.name.rpartition(".")[2] for g in module.functions}
    edges = [
        (g.name, c.rpartition(".")[2]) for g in module.functions for c in g.calls if c.rpartition(".")[2] in own
    ][:12]
    report = f"{len(defs)} definitions in Lib/{module.path}. Calls between them:\n" + "\n".join(
        f"- {a} -> {b}" for a, b in edges
    )
    inner.reply(report, thought="I have the definitions and one body as a check.")
    script.ask(
        f"I want a call graph of {module.name}. Use a subagent, keep the details out of here.",
        f"have an agent look into how the functions in {module.path} depend on each other",
    )
    title = f"Call graph of {module.name}"
    script.reply(
        "I'll have a subagent look.",
        Action("task", pattern=title, command=prompt, output=report, script=inner),
        thought="A read-only search: suitable for a subagent.",
    )
    center = Counter(b for _, b in edges).most_common(1)
    hub = f" The one most depended on is `{center[0][0]}`." if center else ""
    script.reply(f"The subagent found {len(edges)} calls between functions of `Lib/{module.path}`.{hub}")


def _test_output(script: Script, tests: int) -> str:
    dots = "." * tests
    lines = [dots[i : i + 70] for i in range(0, tests, 70)]
    seconds = script.rng.randrange(4, 900) / 1000
    return "\n".join([*lines, "-" * 70, f"Ran {tests} tests in {seconds:.3f}s", "", "OK"])


Scene = Callable[[Script, Module], None]
SCENES: tuple[Scene, ...] = (explain, usages, errors, overview, document, rename, check_argument, compare)


def write_script(seed: str, paths: tuple[str, ...], scenes: int, *required: Scene) -> Script:
    """A script about some modules: the required scenes among others, in a seeded order."""
    rng = random.Random(seed)
    script = Script(rng, [read_module(path) for path in paths])
    chosen = list(required)
    while len(chosen) < scenes:
        chosen += rng.sample(SCENES, k=min(len(SCENES), scenes - len(chosen)))
    rng.shuffle(chosen)
    for i, scene in enumerate(chosen):
        scene(script, script.modules[i % len(script.modules)])
    for module in script.modules:
        if module.path in script.edited:
            show_diff(script, module)
            break
    return script
