"""The `openai` package under a tracer, mlflow or langfuse, that `DIALECT` names with the API: two questions with a tool.

Traces stay here: mlflow's in a file, langfuse's at a server of this program, which must get them.
"""

import os
import runpy
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from conversation import DIALECT

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
TRACER, _, API = DIALECT.partition("-")
received = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def langfuse_openai():
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["LANGFUSE_HOST"] = os.environ["LANGFUSE_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-1"}
    from langfuse import get_client
    from langfuse.openai import OpenAI

    def traces():
        get_client().flush()
        return received

    return OpenAI, traces


def mlflow_openai():
    os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///mlflow.db"
    import mlflow
    import mlflow.openai
    from openai import OpenAI

    mlflow.openai.autolog()

    def traces():
        mlflow.flush_trace_async_logging()
        return mlflow.search_traces(return_type="list")

    return OpenAI, traces


client, traces = {"langfuse": langfuse_openai, "mlflow": mlflow_openai}[TRACER]()
openai.OpenAI = client
runpy.run_module(f"openai_{API}")
assert traces(), "the tracer got nothing"
