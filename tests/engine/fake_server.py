"""A server that behaves as badly as it is told to, with the endpoints by which vLLM and SGLang are steered.

    fake_server.py MODEL PORT GPUS FOLDER [HABIT ...]

Every start adds a line to FOLDER/starts-PORT and every request one to FOLDER/requests-PORT. A habit is NAME or NAME@N, which then
holds for the Nth start alone.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

model, port, gpus, folder, *habits = sys.argv[1:]


def note(name, text):
    with open(os.path.join(folder, f"{name}-{port}"), "a") as file:
        file.write(text + "\n")


note("starts", json.dumps({"pid": os.getpid(), "gpus": gpus, "model": model, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
                           "dev_mode": os.environ.get("VLLM_SERVER_DEV_MODE"), "rank": os.environ.get("RANK"),
                           "session": os.getsid(0), "group": os.getpgid(0)}))
with open(os.path.join(folder, f"starts-{port}")) as file:
    start = len(file.readlines())


def has(habit):
    return habit in habits or f"{habit}@{start}" in habits


print(f"start {start} on GPUs {gpus}", flush=True)
if has("dies-at-start"):
    print("ValueError: no such thing", file=sys.stderr, flush=True)
    sys.exit(3)
if has("ignores-sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if has("leaves-a-worker"):
    # In a session of its own and deaf to SIGTERM, as the worst of workers would be.
    worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
                              start_new_session=True)
    note("workers", str(worker.pid))
if has("never-listens"):
    time.sleep(600)
if has("slow-start"):
    time.sleep(1)


def flood():
    while True:
        os.write(1, b"x" * 4095 + b"\n")


state = {"version": "default", "model": model, "healthy": True}


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            if has("garbage"):
                self.wfile.write(b"\x00\x01 what?\n\n")
            elif not state["healthy"]:
                self.answer(503, {"error": "engine is dead"})
            else:
                self.answer(200, {})
        elif self.path == "/weight_info" and not has("old"):
            self.answer(200, {"weight_version": state["version"]})
        elif self.path == "/get_model_info" and not has("old"):
            self.answer(200, {"weight_version": state["version"], "model_path": state["model"]})
        else:
            self.answer(404, {"error": "no such path"})

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        note("requests", json.dumps([self.path, body]))
        if self.path == "/collective_rpc":
            if has("hangs-on-load"):
                time.sleep(600)
            if has("refuses-load"):
                return self.answer(500, {"error": "no\nroom"})
            if not has("forgets-load"):
                state["model"] = body["kwargs"]["weights_path"]
            return self.answer(200, {"results": [None]})
        if self.path == "/update_weights_from_disk":
            state["model"], state["version"] = body["model_path"], body["weight_version"]
            return self.answer(200 if not has("refuses-load") else 400, {"success": not has("refuses-load"), "message": "said so"})
        if self.path == "/update_weight_version":
            if has("old"):
                return self.answer(404, {"error": "no such path"})
            if not has("forgets-load"):
                state["version"] = body["new_version"]
            return self.answer(200, {})
        self.answer(200, {})

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
server.daemon_threads = True
if has("floods"):
    threading.Thread(target=flood, daemon=True).start()


def misbehave():
    # At a word from the test.
    while True:
        time.sleep(0.02)
        if os.path.exists(os.path.join(folder, f"die-{port}-{start}")):
            print("CUDA error: the device has gone", file=sys.stderr, flush=True)
            os._exit(1)
        if os.path.exists(os.path.join(folder, f"sicken-{port}-{start}")):
            state["healthy"] = False


threading.Thread(target=misbehave, daemon=True).start()
print("listening", flush=True)
server.serve_forever()
