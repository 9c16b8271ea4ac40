"""A program of its own, for runs of several processes: FOLDER and the JSON of a `Toys`."""

import json
import sys

from train_standins import Toys, work

if __name__ == "__main__":
    work(sys.argv[1], Toys(**json.loads(sys.argv[2])), quiet=False)
