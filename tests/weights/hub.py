"""A server of files on this machine, which answers the client of the hub as the hub does."""

import contextlib
import hashlib
import http.server
import pathlib
import threading

REVISION = "0" * 40
# What a repository is, by the name of a file in it, and what the hub answers then.
MARKS = {"gated": (401, "GatedRepo")}


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        owner, name, *inside = self.path.strip("/").split("?")[0].split("/")
        repository = self.server.folder / owner / name
        file = repository.joinpath(*inside[2:])
        if not repository.is_dir():
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif marked := [MARKS[mark] for mark in MARKS if (repository / mark).exists()]:
            ((status, code),) = marked
            self.reply(status, {"X-Error-Code": code})
        elif not file.is_file():
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
        else:
            content = file.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            self.reply(200, {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION}, content)

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        """Nothing is printed."""


@contextlib.contextmanager
def serve(folder):
    """Serves folder/OWNER/NAME/FILE at the address that it returns, until the block ends."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.folder = pathlib.Path(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
