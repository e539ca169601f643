"""Small models for the tests of pulling: a folder, a GGUF file, and a hub that serves one over HTTP."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np

from penstock.models import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "onnx/config.json": b"another tool's",
}


@contextmanager
def hub() -> Generator[str]:
    """A hub with one repository, org/model; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class calls it so)
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/org/model/revision/main":
            body = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode()
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            listed = [{"type": "file", "path": name, "size": len(text), "oid": "0" * 40} for name, text in FILES.items()]
            body = json.dumps(listed).encode()
        else:
            body = FILES.get(path.removeprefix(f"/org/model/resolve/{COMMIT}/"), b"")
        self.send_response(200 if body else 404)
        if not body:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(path)):040x}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def write_gguf(file: Path) -> Path:
    """A llama of one layer, with random weights and the tiny policy's alphabet."""
    width, inner, heads = 32, 64, 2
    alphabet = [*(chr(0x100 + byte) if byte <= 0x20 else chr(byte) for byte in range(0x7F)), "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("mini")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(alphabet) + 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, *tiny.SPECIAL[:2]])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(alphabet) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(alphabet))
    writer.add_eos_token_id(len(alphabet) + 1)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    shapes = {"token_embd": (len(alphabet) + 2, width), "output_norm": (width,)}
    square, wide = (width, width), (inner, width)
    layer = {"attn_norm": (width,), "attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    layer |= {"ffn_norm": (width,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": (width, inner)}
    rng = np.random.default_rng(0)
    for name, shape in {**shapes, **{f"blk.0.{part}": shape for part, shape in layer.items()}}.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
