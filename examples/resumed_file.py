"""Complete a file of prompts, a kill in the middle included: the same program goes on where it was.

python examples/resumed_file.py CHECKPOINT answers.jsonl        # again after a kill, until it says that all are there

The command line does this and more (docs/generation.md); here is how it is done with `LLM.complete`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import graphfuse

QUESTIONS = {f"question-{i}": f"How much is {i} and {i + 1}?" for i in range(12)}


def answered(output: Path) -> set[str]:
    """Ids that have their line. What a kill cut short is taken off first."""
    if not output.exists():
        return set()
    whole = output.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    output.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main(path: str, output: Path) -> None:
    done = answered(output)
    print(f"{len(done)} of {len(QUESTIONS)} are answered.")
    if len(done) == len(QUESTIONS):
        return
    params = graphfuse.SamplingParams(max_tokens=16)

    def jobs() -> Iterator[graphfuse.Job]:  # read as there is room for them
        for key, question in QUESTIONS.items():
            if key not in done:
                yield graphfuse.Job(key, question, params)

    with graphfuse.LLM(path, max_batch_size=4) as llm, output.open("a", encoding="utf-8") as file:
        for key, result in llm.complete(jobs()):  # in whichever order they are done
            if isinstance(result, graphfuse.GraphfuseError):
                line = {"id": key, "error": str(result)}
            else:
                line = {"id": key, "text": result[0].text}
            file.write(json.dumps(line) + "\n")
            file.flush()
    print("All are answered.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
