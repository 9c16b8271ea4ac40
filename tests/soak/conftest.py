import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "lab/run"))  # the stand-ins and comparisons of runs
