"""A shell script of a training, read without a shell: the line that launches it, expanded.

Assignments, arrays, defaults, sums of integers, `if`, `case`, `eval` and `bash -c` are followed;
variables of the environment are unset, but those that `#SBATCH` lines decide. What only a run would
give, such as `$(...)`, a loop's or a function's values, stays as it is written, with its line, and is
refused only where the plan needs it. Nothing is run, and no other file is read.

The launch is the command with the most flags among those that start a Python program. Its ranks are
those of torchrun, deepspeed, accelerate or srun, else of `#SBATCH`.

>>> launch = read_script("TP=8\\nA=(--tensor-model-parallel-size $TP)\\n"
...                      "torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py ${A[@]} --lr $LR")
>>> launch.words[-4:], launch.cluster
(('--tensor-model-parallel-size', '8', '--lr', '$LR'), {'cluster.nodes': 2, 'cluster.gpus_per_node': 8})
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mpctl.core.errors import InputError, Issue
from mpctl.interop.config_text import unreadable
from mpctl.interop.shell_syntax import Node, Word, parse_script
from mpctl.interop.shell_words import Doubt, Variables, doubts_of, is_unexpanded
from mpctl.plan.rules.check import Check

STARTERS = ("torchrun", "deepspeed", "accelerate", "trl", "torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
_COMMAND = rf"(?:{'|'.join(STARTERS[:4])}|srun|mpirun|mpiexec|python\d?(?:\.\d+)?)"
_SCRIPT = re.compile(
    rf"\A#!.*sh\b|^[ \t]*(?:\w+=\S*[ \t]+)*(?:\S*/)?{_COMMAND}\s|^[ \t]*(?:export[ \t]+)?[A-Za-z_]\w*\+?=\(", re.M
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "readonly", "declare", "local", "typeset")
_NO_LAUNCH = ("echo", "printf", "cat", "cp", "mv", "rm", "ls", "sed", "mkdir", "chmod", "pip", "pip3", "git", "which")
_PARALLEL = re.compile(r"^#SBATCH\s+(-{1,2}[\w-]+)(?:[ =]\s*(\S+))?", re.MULTILINE)
MOST = 20_000
"""Commands that are followed, before a script is refused."""


@dataclass(frozen=True, slots=True)
class ScriptLaunch:
    """The command of a script that launches the training.

    words: of the command, expanded. line: of the script. cluster: settings of its ranks. doubts:
    variables that only a run would set. warnings. documents: files that the script itself writes.
    """

    words: tuple[str, ...]
    line: int
    cluster: Mapping[str, int]
    doubts: Mapping[str, Doubt]
    warnings: tuple[Check, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The command line, quoted."""
        return shlex.join(self.words)

    def flag(self, *names: str) -> str:
        """The value of the last of these flags on the line, `--name value` or `--name=value`."""
        found = ""
        for word, following in zip(self.words, (*self.words, "")[1:], strict=True):
            name, equals, value = word.partition("=")
            if name in names:
                found = value if equals else following
        return found

    def with_lines(self, error: InputError) -> InputError:
        """The error, with the lines that set the variables in it."""
        issues = []
        for issue in error.issues:
            lines = list(dict.fromkeys(doubts_of(issue.message, self.doubts)))
            if lines:
                hint = f"{'; '.join(lines[:3])}: write its value there, in a copy of the script"
                issue = Issue(issue.rule, issue.where, issue.message, hint)
            elif "belongs to no flag" in issue.message:
                hint = f'a shell splits unquoted values at blanks: write "${{ARGS[@]}}" in quotes on line {self.line}'
                issue = Issue(issue.rule, issue.where, issue.message, hint)
            issues.append(issue)
        return InputError(issues)


def is_script(text: str) -> bool:
    """Whether a text is a shell script or a command line, and no configuration or bare flags."""
    return _SCRIPT.search(text) is not None


def read_script(text: str) -> ScriptLaunch:
    """The launch of a script. Raises InputError where there is none, where it lies in a loop or a
    function, or where the script is not complete."""
    reader = _Reader(text.replace("\r\n", "\n"))
    reader.run(reader.nodes, None)
    return reader.launch()


@dataclass(frozen=True, slots=True)
class _Found:
    words: tuple[str, ...]
    line: int
    doubt: Doubt | None

    @property
    def flags(self) -> int:
        return sum(word.startswith("--") for word in self.words[self.program :])

    @property
    def program(self) -> int:
        return program_of(self.words) or 0


def program_of(words: Sequence[str]) -> int | None:
    """The position of the program among a command's words: the first that ends in .py, the module
    after -m that is no launcher, or `sft` of `trl sft`."""
    for at, word in enumerate(words):
        if word == "sft" and words[at - 1].rsplit("/", 1)[-1] == "trl":
            return at
        if word.endswith(".py") and not word.startswith("-"):
            return at
        if word == "-m" and at + 1 < len(words) and words[at + 1] not in STARTERS:
            return at + 1
    return None


class _Reader:
    """A script while its commands are followed."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.batch = dict(_PARALLEL.findall(text))
        self.nodes = parse_script(text)
        self.variables = Variables(dict(_slurm(self.batch)))
        self.found: list[_Found] = []
        self.warnings: list[Check] = []
        self.documents: dict[str, str] = {}
        self.assumed: list[tuple[Doubt, frozenset[str]]] = []
        self.count = 0

    def launch(self) -> ScriptLaunch:
        sure = [found for found in self.found if found.doubt is None]
        if not sure:
            raise self._no_launch()
        best = max(sure, key=lambda found: found.flags)
        cluster = dict(_ranks(best.words, self.batch))
        return ScriptLaunch(
            best.words,
            best.line,
            cluster,
            self.variables.doubts,
            (*self.warnings, *self._assumptions(best), *self._others(best, sure), *self._open_ranks(best, cluster)),
            self.documents,
        )

    def _no_launch(self) -> InputError:
        if self.found:
            found = max(self.found, key=lambda found: found.flags)
            message = f"line {found.line} launches a training under {found.doubt}, which only a run decides"
            return unreadable(
                message, "give that command alone, or a copy of the script without the condition around it"
            )
        hint = "name a script that has torchrun, python, srun, deepspeed or accelerate launch, and a program NAME.py"
        return unreadable("the script has no command that launches a training", hint)

    def _assumptions(self, best: _Found) -> Iterator[Check]:
        """Conditions on variables of the environment that decide what the launch needs."""
        for doubt, names in self.assumed:
            if names & self.variables.asked:
                message = f"{doubt}: read as in an empty environment"
                hint = f"it decides {', '.join(sorted(names)[:4])}: set its variable at the script's head if it is set"
                yield Check("script-environment", "warning", "--from", message, hint)
        if nodes := [name for name in self.variables.defaults if re.search(r"N?NODES$|WORLD_SIZE$", name)]:
            message = f"{nodes[0]} is not set: planned with its default, {self.variables.defaults[nodes[0]]}"
            yield Check("script-environment", "warning", "--from", message, "give --nodes N where it is another")
        if {"@", "*"} & self.variables.asked:
            message = "the script's own arguments ($@) are read as none"
            yield Check(
                "script-arguments", "warning", "--from", message, "write them into the script where there are some"
            )

    def _others(self, best: _Found, sure: list[_Found]) -> Iterator[Check]:
        others = [f"line {found.line}" for found in sure if found.words != best.words and found.flags]
        if others:
            message = f"line {best.line} is read as the training; {', '.join(others[:5])} starts Python, too"
            yield Check("script-launches", "warning", "--from", message, "if another is meant, give that command alone")

    def _open_ranks(self, best: _Found, cluster: Mapping[str, int]) -> Iterator[Check]:
        """Numbers of nodes or ranks that the line has, and only a run would give."""
        for setting, names in _RANK_FLAGS.items():
            word = _flag(best.words, names)
            if setting not in cluster and is_unexpanded(word):
                lines = doubts_of(word, self.variables.doubts)
                message = f"{word} is not known: {'; '.join(lines) or 'a variable of the environment'}"
                option = "--nodes" if setting == "cluster.nodes" else "--gpus-per-node"
                yield Check("script-ranks", "warning", "--from", message, f"give {option} N, or --cluster")

    def run(self, nodes: Iterable[Node], doubt: Doubt | None) -> bool | None:
        """Follow commands; the status of the last, None where only a run would tell. doubt: why it
        is not known whether they run."""
        status: bool | None = True
        for node in nodes:
            if (node.joined == "&&" and status is False) or (node.joined == "||" and status is True):
                continue
            unsure = doubt
            if node.joined in ("&&", "||") and status is None:
                unsure = doubt or self._doubt(node)
            self.count += 1
            if self.count > MOST:
                raise unreadable(f"the script has more than {MOST:,} commands", "give the launch command alone")
            status = getattr(self, f"_{node.kind}")(node, unsure)
        return status

    def _doubt(self, node: Node) -> Doubt:
        return Doubt(
            node.line, self.lines[node.line - 1][:200].strip()[:80] if node.line <= len(self.lines) else node.kind
        )

    def _group(self, node: Node, doubt: Doubt | None) -> bool | None:
        return self.run(node.branches[0][1], doubt)

    def _function(self, node: Node, doubt: Doubt | None) -> bool | None:
        self.run(node.branches[0][1], doubt or self._doubt(node))
        return True

    def _for(self, node: Node, doubt: Doubt | None) -> bool | None:
        name, *rest = node.words
        items = [text for word in rest[1:] for text in self.variables.fields(word.raw)]
        if len(items) == 1 and not is_unexpanded(items[0]) and "*" not in items[0]:
            self.variables.put(name.raw, items[0])
            return self.run(node.branches[0][1], doubt)
        if items:
            why = self._doubt(node)
            self.variables.forget(name.raw, why)
            self.run(node.branches[0][1], doubt or why)
        return True

    def _while(self, node: Node, doubt: Doubt | None) -> bool | None:
        asked, body = node.branches[0]
        if self._holds(asked)[0] is not False:
            self.run(body, doubt or self._doubt(node))
        return True

    def _if(self, node: Node, doubt: Doubt | None) -> bool | None:
        for asked, body in node.branches:
            holds, is_assumed = self._holds(asked) if asked else (True, False)
            if is_assumed:
                self.assumed.append((self._doubt(asked[0]), _names(body for _, body in node.branches)))
            if holds:
                self.run(body, doubt)
                return True
            if holds is None:
                doubt = doubt or self._doubt(asked[0])
                self.run(body, doubt)
        return True

    def _case(self, node: Node, doubt: Doubt | None) -> bool | None:
        self.variables.unset.clear()
        subject = self.variables.text(node.words[0].raw)
        if self.variables.unset:
            self.assumed.append((self._doubt(node), _names(body for _, body in node.branches)))
            subject = ""
        elif is_unexpanded(subject):
            for _, body in node.branches:
                self.run(body, doubt or self._doubt(node))
            return True
        for (patterns, *_), body in node.branches:
            if any(fnmatchcase(subject, self.variables.text(word.raw)) for word in patterns.words):
                return self.run(body, doubt)
        return True

    def _holds(self, asked: Sequence[Node]) -> tuple[bool | None, bool]:
        """Whether a condition holds, None where only a run would tell, and whether it depends on
        variables that are not set."""
        self.variables.unset.clear()
        status: bool | None = True
        for node in asked:
            if (node.joined == "&&" and status is False) or (node.joined == "||" and status is True):
                continue
            status = self._test(node)
        return status, bool(self.variables.unset)

    def _test(self, node: Node) -> bool | None:
        words = [word.raw for word in node.words]
        if node.kind != "command" or not words:
            return None
        if words[0] == "!":
            status = self._test(Node("command", node.line, words=node.words[1:]))
            return None if status is None else not status
        if words[0] == "[[" and {"&&", "||"} & {*words}:
            return None
        if len(words) == 1 and words[0].startswith("(("):
            words = ["[", *re.sub(r"(==|!=|<=|>=|<|>)", r" \1 ", words[0][2:-2]).split(), "]"]
        if words[0] not in ("[", "[[", "test"):
            return {"true": True, ":": True, "false": False}.get(words[0])
        return self._compared(words[1:] if words[0] == "test" else words[1:-1])

    def _compared(self, words: list[str]) -> bool | None:
        """The status of a test of texts or integers, of which an empty one is 0."""
        if words[:1] == ["!"]:
            status = self._compared(words[1:])
            return None if status is None else not status
        known = [self._known(word) for word in words]
        if len(words) == 2 and known[1] is not None and words[0] in ("-n", "-z"):
            return bool(known[1]) == (words[0] == "-n")
        if len(words) == 1 and known[0] is not None:
            return bool(known[0])
        if len(words) != 3 or known[0] is None or known[2] is None:
            return None
        left, sign, right = known[0], words[1], known[2]
        if sign in ("=", "=="):
            return fnmatchcase(left, right)
        if sign == "!=":
            return not fnmatchcase(left, right)
        if not all(re.fullmatch(r"-?\d{0,18}", text) for text in (left, right)):
            return None
        a, b = int(left or 0), int(right or 0)
        signs = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}
        return (signs | {">": a > b, "<": a < b, ">=": a >= b, "<=": a <= b}).get(sign)

    def _known(self, raw: str) -> str | None:
        """The text of a word, with variables that are not set as empty; None where it is not known."""
        text = self.variables.text(raw)
        for name in re.findall(r"\$\{?(\w+)", text):
            if name in self.variables.doubts:
                return None
            text = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", "", text)
        return None if is_unexpanded(text) else text

    def _command(self, node: Node, doubt: Doubt | None) -> bool | None:
        words = list(node.words)
        if node.documents:
            target, *texts = node.documents
            self.documents |= {self.variables.text(target): self.variables.document(text) for text in texts}
            if words and words[0].raw in ("sbatch", "bash", "sh"):
                for text in texts:
                    self.run(parse_script(self.variables.document(text)), doubt)
                return True
        if not words or node.joined == "|":
            return True
        first = words[0].raw
        if first in ("[", "[[", "test", "!"):
            return self._test(node)
        if all(word.elements is not None or _ASSIGNMENT.fullmatch(word.raw) for word in words):
            for word in words:
                self._assign(word, doubt)
        elif first in _DECLARES:
            for word in words[1:]:
                self._assign(word, doubt)
        elif first in ("source", "."):
            message = f"{self._doubt(node)}: not read; what it sets is not known"
            hint = "write what the plan needs into the script, or give mpctl's flags"
            self.warnings.append(Check("script-source", "warning", "--from", message, hint))
        elif first in ("read", "mapfile", "readarray", "getopts"):
            for word in words[1:]:
                self.variables.forget(word.raw, self._doubt(node))
        else:
            self._started([text for word in words for text in self.variables.fields(word.raw)], node, doubt)
        return True

    def _assign(self, word: Word, doubt: Doubt | None) -> None:
        found = _ASSIGNMENT.fullmatch(word.raw)
        if found is None:
            return
        name, adds, raw = found[1], bool(found[2]), found[3]
        text = self.lines[word.line - 1][:200].strip()[:80] if word.line <= len(self.lines) else word.raw
        if doubt is not None:
            self.variables.forget(name, doubt)
        elif word.elements is not None:
            value = tuple(text for element in word.elements for text in self.variables.fields(element.raw))
            self.variables.put(name, value, adds=adds)
        elif re.search(r"\$\((?!\()|`|[<>]\(", value_text := self.variables.text(raw)) or "$((" in value_text:
            self.variables.forget(name, Doubt(word.line, text))
        else:
            self.variables.put(name, value_text, adds=adds)

    def _started(self, words: list[str], node: Node, doubt: Doubt | None) -> None:
        """A command: a launch, or a text that another shell would read."""
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if not words or words[0] in _NO_LAUNCH:
            return
        shells = [n for n, word in enumerate(words[:-1]) if word in ("-c", "-lc") and _is_shell(words[n - 1])]
        if words[0] == "eval" or shells:
            inner = " ".join(words[1:]) if words[0] == "eval" else words[shells[0] + 1]
            before = [] if words[0] == "eval" else words[: shells[0] - 1]
            for part in parse_script(inner):
                if part.kind == "command" and part.joined != "|":
                    again = [text for word in part.words for text in self.variables.fields(word.raw)]
                    self._started([*before, *again], node, doubt)
            return
        has_starter = any(word.rsplit("/", 1)[-1] in STARTERS for word in words)
        program = program_of(words)
        if program is None and not (has_starter and any(word.startswith("--") for word in words)):
            return
        is_python = any(_PYTHON.match(word.rsplit("/", 1)[-1]) or is_unexpanded(word) for word in words[:program])
        if has_starter or is_python or program == 0:
            self.found.append(_Found(tuple(words), node.line, doubt))


def _is_shell(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in ("bash", "sh", "zsh")


def _names(bodies: Iterable[Sequence[Node]]) -> frozenset[str]:
    """The variables that commands set, at any depth."""
    names: set[str] = set()
    for body in bodies:
        for node in body:
            names |= {found[1] for word in node.words if (found := _ASSIGNMENT.fullmatch(word.raw))}
            names |= _names(inner for _, inner in node.branches)
    return frozenset(names)


_RANK_FLAGS = {
    "cluster.nodes": ("--nnodes", "--nnode", "--num_nodes", "--num_machines"),
    "cluster.gpus_per_node": ("--nproc-per-node", "--nproc_per_node", "--num_gpus"),
}
_BATCH_NODES = ("--nodes", "-N")
_BATCH_RANKS = ("--ntasks-per-node", "--gpus-per-node", "--gres")


def _slurm(batch: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that Slurm sets by a script's `#SBATCH` lines."""
    for name, flags in {
        "SLURM_NNODES": _BATCH_NODES,
        "SLURM_JOB_NUM_NODES": _BATCH_NODES,
        "SLURM_NTASKS_PER_NODE": ("--ntasks-per-node",),
        "SLURM_GPUS_PER_NODE": ("--gpus-per-node", "--gres"),
        "SLURM_GPUS_ON_NODE": ("--gpus-per-node", "--gres"),
        "SLURM_NTASKS": ("--ntasks", "-n"),
    }.items():
        if count := _count(next((batch[flag] for flag in flags if flag in batch), "")):
            yield name, str(count)


def _count(text: str) -> int | None:
    """A count of GPUs or nodes: `8`, `gpu:8`, `gpu:a100:8`; None for `2:4`, `auto` or a variable."""
    last = text.rsplit(":", 1)[-1] if text.startswith("gpu:") or re.match(r"[a-z]\w*:\d+$", text) else text
    return int(last) if last.isdecimal() and 0 < int(last) < 10**7 else None


def _flag(words: Sequence[str], names: Sequence[str]) -> str:
    return ScriptLaunch(tuple(words), 0, {}, {}).flag(*names)


def _ranks(words: Sequence[str], batch: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Nodes and ranks a node: of torchrun, deepspeed or accelerate, then of srun, then of sbatch."""
    program = program_of(words)
    is_trl = program is not None and words[program] == "sft"  # which takes accelerate's flags, too
    before = words if is_trl else words[:program]
    bare = {word.rsplit("/", 1)[-1] for word in before}
    slurm = [*(f"{name}={value}" for name, value in batch.items()), *(before if "srun" in bare else ())]
    nodes = _count(_flag(before, _RANK_FLAGS["cluster.nodes"])) or _count(_flag(slurm, _BATCH_NODES))
    if not nodes and "--standalone" in before:
        nodes = 1
    ranks = _count(_flag(before, _RANK_FLAGS["cluster.gpus_per_node"]))
    if total := _count(_flag(before, ("--num_processes",))):
        ranks = total // (nodes or 1) if total % (nodes or 1) == 0 else None
    if not ranks and not bare & {*STARTERS}:
        ranks = next((n for flag in _BATCH_RANKS if (n := _count(_flag(slurm, (flag,))))), None)
    if nodes:
        yield "cluster.nodes", nodes
    if ranks:
        yield "cluster.gpus_per_node", ranks
