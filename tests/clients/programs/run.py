"""Runs a program's cases: ``python run.py PROGRAM`` reads ``{case: arguments}`` as JSON, and writes what each returned or raised.

It runs in the clients' environment, which has nothing of Rollwright.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import time
import traceback
from importlib.metadata import version


def main() -> None:
    asked = json.load(sys.stdin)
    said, sys.stdout = sys.stdout, sys.stderr  # what clients print is no answer
    module = importlib.import_module(sys.argv[1])
    results = {}
    for case, arguments in asked["cases"].items():
        started = time.perf_counter()
        try:
            value = getattr(module, case)(**arguments)
            results[case] = {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
        except BaseException:
            results[case] = {"error": traceback.format_exc()}
        results[case]["seconds"] = time.perf_counter() - started
    versions = {client: version(client) for client in asked["clients"]}
    json.dump({"versions": versions, "results": results}, said, default=str)


if __name__ == "__main__":
    main()
