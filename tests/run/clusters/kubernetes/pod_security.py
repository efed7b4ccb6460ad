"""The Pod Security Standard `restricted`, as Kubernetes publishes it (Pod Security Standards,
concepts/security/pod-security-standards, of 1.32), as far as pods on Linux without init containers
are concerned: what a namespace with `pod-security.kubernetes.io/enforce: restricted` would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
PROFILES = {"RuntimeDefault", "Localhost"}


def restricted_issues(pod: dict[str, Any]) -> Iterator[str]:
    """Why the policy refuses a pod. pod: its `spec`."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", []):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {sorted(kinds)}"
    whole = pod.get("securityContext", {})
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        context = whole | own
        capabilities = own.get("capabilities", {})
        if own.get("privileged"):
            yield "privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if "ALL" not in capabilities.get("drop", []):
            yield "capabilities are not dropped"
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"capabilities {capabilities['add']}"
        if context.get("runAsNonRoot") is not True:
            yield "runAsNonRoot"
        if context.get("runAsUser") == 0:
            yield "runAsUser 0"
        if context.get("seccompProfile", {}).get("type") not in PROFILES:
            yield "seccompProfile"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield "hostPort"
