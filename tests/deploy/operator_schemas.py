"""Fields of the operators' kinds that the chart uses: KubeRay's RayService (ray.io/v1) and the
Prometheus operator's ServiceMonitor (monitoring.coreos.com/v1), from their API references.

Pods within a RayService are checked against Kubernetes' own schema instead.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
FREE: Schema = {"type": "object"}
POD: Schema = {"type": "object", "required": ["metadata", "spec"]}


def record(*required: str, **fields: Schema) -> Schema:
    """An object of these fields, and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": fields,
        "additionalProperties": False,
    }


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = record("name", "labels", name=TEXT, labels=LABELS)
    fields = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return record(*fields, "metadata", "spec", **fields, metadata=metadata, spec=spec)


SERVICE = record(
    "metadata",
    "spec",
    metadata=record("name", name=TEXT, labels=LABELS, annotations=LABELS),
    spec=record("ports", type=TEXT, sessionAffinity=TEXT, ports={"type": "array", "items": FREE}),
)
WORKERS = record(
    "groupName",
    "template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=LABELS,
    template=POD,
)
CLUSTER = record(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=record(securityContext=FREE),
    headGroupSpec=record("template", rayStartParams=LABELS, template=POD),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_SERVICE = record(
    "rayClusterConfig",
    upgradeStrategy=record(type={"enum": ["NewCluster", "None"]}),
    serveService=SERVICE,
    serveConfigV2=TEXT,
    rayClusterConfig=CLUSTER,
)
ENDPOINT = record(
    port=TEXT,
    path=TEXT,
    interval={"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
    authorization=record(type=TEXT, credentials=record("key", name=TEXT, key=TEXT)),
)
SERVICE_MONITOR = record(
    "endpoints",
    "selector",
    selector=record(matchLabels=LABELS),
    endpoints={"type": "array", "items": ENDPOINT},
)
OPERATOR_SCHEMAS = {
    "RayService": resource("ray.io/v1", "RayService", RAY_SERVICE),
    "ServiceMonitor": resource("monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR),
}
