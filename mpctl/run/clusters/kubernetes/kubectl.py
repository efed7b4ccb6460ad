"""Calling kubectl as a child process: creating, reading and deleting objects.

The user's kubectl is used, with its configuration, credential plugins and proxies. Arguments are
lists, an object is sent through standard input, every call has a time limit, and standard input is
never the terminal's, since kubectl asks there for a password.

kubectl ends with 1 whatever went wrong. The kind of failure is read from its message: the server's
`Error from server (REASON)`, or that of a failed connection.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mpctl.core.errors import InputError, Issue

CALL_SECONDS = 60.0
REQUEST_SECONDS = 20
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""A DNS label (RFC 1123), such as the name of a namespace: `team-a`."""


class KubectlWords(NamedTuple):
    """A message of kubectl or of the API server, and its meaning. pattern: searched for without
    regard to case."""

    rule: str
    pattern: str
    message: str
    hint: str


KNOWN = (
    KubectlWords(
        "no-context",
        r"context .*(was not found|does not exist)|current-context is not set"
        r"|no configuration has been",
        "kubectl has no such context",
        "see `kubectl config get-contexts`; set launch.kubernetes.context or KUBECONFIG",
    ),
    KubectlWords(
        "no-cluster",
        r"unable to connect to the server|connection to the server .* refused"
        r"|failed to download openapi|no such host|i/o timeout|tls handshake|deadline exceeded",
        "the API server of the cluster does not answer",
        "check `kubectl cluster-info`, KUBECONFIG, and that this machine reaches the cluster",
    ),
    KubectlWords(
        "not-logged-in",
        r"unauthorized|must be logged in|provide credentials|getting credentials",
        "the cluster does not accept the credentials of kubectl",
        "log in again, and check with `kubectl auth whoami`",
    ),
    KubectlWords(
        "no-such-kind",
        r"no matches for kind|doesn't have a resource type",
        "the cluster does not know this kind of object",
        "install Kubeflow Trainer (TrainJob), the Training Operator (PyTorchJob) or JobSet, or set "
        "launch.kubernetes.kind to the one that is installed",
    ),
    KubectlWords(
        "over-quota",
        r"exceeded quota",
        "the namespace has no quota left for it",
        "ask for fewer nodes, free quota, or submit through a queue (launch.kubernetes.queue)",
    ),
    KubectlWords(
        "refused-by-webhook", r"denied the request", "the cluster refuses the object", "change what the message names"
    ),
    KubectlWords(
        "forbidden",
        r"\(forbidden\)",
        "this user may not do that",
        "ask for a role with the verbs create, get, list and delete, or use another launch.kubernetes.namespace",
    ),
    KubectlWords(
        "no-namespace",
        r"namespaces .* not found",
        "there is no such namespace",
        "set launch.kubernetes.namespace to one of `kubectl get namespaces`",
    ),
    KubectlWords(
        "already-exists",
        r"\(alreadyexists\)",
        "an object of this name exists already",
        "submit again in a second: the name ends with the time",
    ),
    KubectlWords(
        "not-found", r"\(notfound\)", "there is no such object", "it was deleted, or is in another namespace or context"
    ),
)


class KubectlError(InputError):
    """A call of kubectl that failed. rule: which failure of KNOWN it was, or `kubectl-failed`."""

    def __init__(self, issue: Issue) -> None:
        super().__init__([issue])
        self.rule = issue.rule


@dataclass(frozen=True)
class Kubectl:
    """Calls of kubectl in one namespace of one cluster; None for kubectl's current ones."""

    namespace: str | None = None
    context: str | None = None

    def call(self, *arguments: str, text: str = "") -> str:
        """The output of kubectl; text: its standard input.

        Raises KubectlError where there is no kubectl, or it fails or takes over CALL_SECONDS.
        """
        chosen = {"--namespace": self.namespace, "--context": self.context}
        options = [f"{option}={value}" for option, value in chosen.items() if value is not None]
        command = ["kubectl", *options, f"--request-timeout={REQUEST_SECONDS}s", *arguments]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=CALL_SECONDS)
        except FileNotFoundError:
            message = "kubectl is not installed here"
            hint = "install it, or create the object that --dry-run prints from where it is"
            raise KubectlError(Issue("no-kubectl", "kubectl", message, hint)) from None
        except OSError as error:
            issue = Issue("no-kubectl", "kubectl", f"it cannot be run: {error.strerror or error}")
            raise KubectlError(issue) from None
        except subprocess.TimeoutExpired:
            message = f"`kubectl {arguments[0]}` has not ended after {CALL_SECONDS:g} s"
            hint = "check `kubectl cluster-info`; a plugin for credentials may wait for input"
            raise KubectlError(Issue("no-cluster", "kubectl", message, hint)) from None
        if done.returncode:
            raise KubectlError(failure_issue(done.stderr, arguments[0]))
        return done.stdout

    def create(self, manifest: str, *, dry_run: bool = False) -> None:
        """Create the object of a YAML or JSON text; dry_run: only let the cluster check it."""
        self.call("create", *(["--dry-run=server"] if dry_run else []), "-f", "-", text=manifest)

    def get(self, resource: str, *more: str) -> dict[str, object]:
        """An object, or with a selector a list of them. resource: `pods`, `trainjobs.GROUP`."""
        document = json.loads(self.call("get", resource, *more, "-o", "json"))
        return document if isinstance(document, dict) else {}

    def find(self, resource: str, name: str) -> dict[str, object] | None:
        """Return an object by name; None if it does not exist."""
        try:
            return self.get(resource, name)
        except KubectlError as error:
            if error.rule == "not-found":
                return None
            raise

    def delete(self, resource: str, name: str) -> None:
        """Delete an object and what belongs to it, without waiting until all of it has ended."""
        self.call("delete", resource, name, "--wait=false", "--ignore-not-found")


def failure_issue(stderr: str, verb: str) -> Issue:
    """The issue of a failed call of kubectl, from its stderr. verb: `create`, `get`, ..."""
    lines = list(_telling(stderr))
    words = lines[-1] if lines else "it said nothing"
    for known in KNOWN:
        if re.search(known.pattern, " ".join(lines), re.IGNORECASE):
            return Issue(known.rule, "kubectl", f"{known.message}: {words}", known.hint)
    hint = f"run `kubectl {verb}` by hand to see more"
    return Issue("kubectl-failed", "kubectl", words, hint)


def _telling(stderr: str) -> Iterator[str]:
    """The lines with the cause: without kubectl's log lines (E1122 02:45:05 ...), empty ones, its
    advice about --validate and its file name for standard input."""
    for line in stderr.splitlines():
        if line.strip() and not re.match(r"[EWI]\d{4} \d\d:", line):
            plain = line.partition("; if you choose to ignore")[0]
            yield re.sub(r'error when creating "STDIN": ', "", plain.strip())
