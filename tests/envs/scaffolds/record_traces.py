"""Make the recorded requests of the agent programs again: `python tests/envs/scaffolds/record_traces.py`.

They go to tests/sao_gym/gateway/traces/, where the default tests send them to a gateway without the programs. The tests
with the programs compare what these ask today with what was recorded.
"""

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "sao_gym" / "gateway")]
from program_world import SCENES, traced
from traces import FOLDER


def main() -> None:
    """Write each scene's trace."""
    FOLDER.mkdir(exist_ok=True)
    for name in SCENES:
        _, trace = traced(name)
        text = json.dumps(trace, ensure_ascii=False, indent=1)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
