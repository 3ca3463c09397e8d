"""The names of settings in the Helm chart's schema, made from the settings of the service.

python -m tools.chart          # prints values.schema.json as it should be
python -m tools.chart --write  # writes it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ragcache_api.settings import ServiceSettings

SCHEMA = Path(__file__).parent.parent / "deploy" / "helm" / "ragcache" / "values.schema.json"
SET_BY_CHART = {"host", "port", "state", "ledger", "remote", "replicas", "autoscale"}
"""Settings that the chart's templates set."""


def written_schema() -> str:
    """Return the schema with the names of all settings that values may set."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    names = ServiceSettings.model_fields.keys() - SET_BY_CHART - ServiceSettings.withheld.keys()
    schema["properties"]["settings"]["propertyNames"]["enum"] = sorted(names)
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        SCHEMA.write_text(written_schema(), encoding="utf-8")
    else:
        sys.stdout.write(written_schema())
