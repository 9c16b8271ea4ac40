"""A program of its own, for runs of several processes: FOLDER and a JSON of {"toys", "resume", "moment", "number"}."""

import json
import os
import sys

from train_standins import Toys, work

if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    moment = asked.get("moment", "") if first else ""
    work(sys.argv[1], Toys(**asked["toys"]), asked.get("resume", False), moment, asked.get("number", 0), quiet=False)
