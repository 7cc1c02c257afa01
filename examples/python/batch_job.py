"""A batch job: questions are answered by ``inl run-batch``, without a server.

pip install "./core[cli,serve]" ./plugins/inl-cpu
python examples/python/batch_job.py FOLDER

A job that was interrupted continues when it is run again: answers that are in the file
are not computed twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COUNTRIES = ("France", "Italy", "Japan", "Egypt")


def write_requests(path: Path) -> None:
    """Write one request of OpenAI's batch format for each country."""
    with path.open("w", encoding="utf-8") as file:
        for country in COUNTRIES:
            question = f"What is the capital of {country}?"
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 24}
            url = "/v1/chat/completions"
            line = {"custom_id": country, "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def read_answers(path: Path) -> dict[str, str]:
    """Return the text of each answer, by the name of its request."""
    answers = {}
    for line in path.read_text("utf-8").splitlines():
        answer = json.loads(line)
        response = answer["response"]
        if response["status_code"] != 200:
            raise SystemExit(f"{answer['custom_id']}: {response['body']}")
        choice = response["body"]["choices"][0]
        answers[answer["custom_id"]] = choice["message"]["content"]
    return answers


def main(folder: str = ".", *options: str) -> None:
    """Options are those of ``inl run-batch``, such as ``--model`` and ``--device``."""
    requests, answers = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
    write_requests(requests)
    command = [sys.executable, "-m", "inl", "run-batch", requests, answers, *options]
    subprocess.run(command, check=True)
    for name, answer in sorted(read_answers(answers).items()):
        print(f"{name}: {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
