"""A plugin of pytest that runs those tests first that noticed similar bugs, and then the fastest ones."""

import json
import os
from collections import Counter
from pathlib import Path

FIRST = os.environ["MUTANTS_FIRST"].split()
FILE = Path(os.environ["MUTANTS_DURATIONS"])
durations = Counter(json.loads(FILE.read_text()) if FILE.exists() else {})
measured: Counter[str] = Counter()


def pytest_collection_modifyitems(items):
    names = {item.nodeid: item.nodeid.partition("[")[0] for item in items}
    places = {name: FIRST.index(name) for name in names.values() if name in FIRST}
    items.sort(key=lambda item: (places.get(names[item.nodeid], len(FIRST)), durations[item.nodeid]))


def pytest_runtest_logreport(report):
    measured[report.nodeid] += report.duration


def pytest_sessionfinish(exitstatus):
    if exitstatus == 0:
        FILE.write_text(json.dumps(durations | measured))
