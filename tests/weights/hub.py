"""A server of files on this machine, which answers the client of the hub as the hub does."""

import contextlib
import hashlib
import http.server
import pathlib
import re
import threading

REVISION = "0" * 40


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        parts = self.path.strip("/").split("?")[0].split("/")  # owner, name, "resolve", "main", ...
        repository = self.server.folder.joinpath(*parts[:2])
        file = repository.joinpath(*parts[4:])
        if not repository.is_dir():
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif (repository / "gated").exists():
            self.reply(401, {"X-Error-Code": "GatedRepo"})
        elif not file.is_file():
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
        else:
            self.send_part(file.read_bytes())

    do_HEAD = do_GET  # noqa: N815

    def send_part(self, content):
        """Answers with a file, or its end if the request asks for that and the server has parts."""
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": REVISION}
        asked = self.server.parts and re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.server.starts.append(start)
        if start and start >= len(content):
            return self.reply(416, headers)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if asked else 200, headers, content[start:])

    def reply(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: self.server.cut])
            self.server.cut = None

    def log_message(self, *arguments):
        """Nothing is printed."""


@contextlib.contextmanager
def serve(folder, *, parts=True, cut=None):
    """Serves folder/OWNER/NAME/FILE at the `url` of the server that it returns.

    Args:
        folder: of the files.
        parts: whether files are also served from a place in them on.
        cut: bytes after which the first answer ends; None for all.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.folder, server.parts, server.cut = pathlib.Path(folder), parts, cut
        server.starts = []  # of the files' parts that were sent
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield server
        server.shutdown()
