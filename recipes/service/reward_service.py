"""A reward as an HTTP service, with Python's standard library alone:

    python recipes/service/reward_service.py            # then, elsewhere: headrace train recipes/service/service.toml

It gives 1 to a completion whose last number is the right answer. `POST /score` gets prompts, completions and the columns of the row, and answers
with one score for each completion (docs/scoring.md).
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUMBER = re.compile(r"(?<![A-Za-z\d_.,])-?\d+(?:[.,]\d+)*")  # no sign in 5-3, and 1,2 is not 2


def score(completion: str, answer: str) -> float:
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and numbers[-1] == answer)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [score(*both) for both in zip(asked["completions"], asked["answer"], strict=True)]
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 8090), Handler)
    print("scores on http://127.0.0.1:8090/score")
    server.serve_forever()
