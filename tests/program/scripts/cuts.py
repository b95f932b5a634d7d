"""Prints what `explain` says that the model axis cuts, in order."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_layouts as here

print(json.dumps([here.cuts(*here.gpt(), here.BOTH), here.cuts(*here.mlp(layers=2), here.BOTH)]))
