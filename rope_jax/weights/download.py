"""Downloads of weights, from the hub by huggingface_hub and from other addresses by requests.

Interrupted downloads are resumed.
"""

import fcntl
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from rope_jax.system.files import file_sha256

_INSTALL = "install the extra: pip install 'rope_jax[hub]'"
_TIMEOUT = 10  # seconds without an answer
_CHUNK = 1 << 16  # bytes; of an interrupted download, the last incomplete one is lost


def hub_file(repository: str, names: Sequence[str]) -> str:
    """The path of a file of a hub repository in the hub's cache, downloaded if it is not there.

    Args:
        repository: "owner/name".
        names: of files, of which the first that exists is taken.

    Raises:
        FileNotFoundError: there is no such repository or file, or the download failed.
        PermissionError: the repository is gated, and the user has no access.
        ImportError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub import utils as errors
    except ImportError as error:
        raise ImportError(
            f"pretrained={repository!r} is a hub id, which needs huggingface_hub: {_INSTALL}"
        ) from error
    reachable = _hub_answers()
    for name in names:
        try:
            return hf_hub_download(repository, name, local_files_only=not reachable)
        except errors.GatedRepoError as error:
            raise PermissionError(
                f"pretrained={repository!r} is a gated repository: accept its terms on the hub's "
                "page, and log in by `hf auth login` or set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise FileNotFoundError(
                f"pretrained={repository!r}: the hub has no such repository, or it is private"
            ) from error
        except errors.EntryNotFoundError as error:
            if reachable and isinstance(error, errors.LocalEntryNotFoundError):
                raise FileNotFoundError(_failure(repository, error)) from error
        except Exception as error:  # of requests or httpx, and a wrong size
            raise FileNotFoundError(_failure(repository, error)) from error
    if not reachable:
        raise FileNotFoundError(
            f"pretrained={repository!r} is not in the cache, and the hub cannot be reached: try "
            "again with a network, or name a file (of published weights, its folder: weights_dir)"
        )
    raise FileNotFoundError(
        f"pretrained={repository!r}: the repository has none of {', '.join(names)}"
    )


def _failure(where: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0][:120]
    return (
        f"{where} could not be downloaded ({type(error).__name__}: {reason}): try again, which "
        "resumes the download"
    )


def _hub_answers() -> bool:
    """True if the hub can be reached: its client alone would try for 23 seconds."""
    from huggingface_hub import constants, utils

    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # of requests or httpx, or of the client's offline mode
        return False
    return True


def download(url: str, path: pathlib.Path) -> None:
    """Downloads a file.

    An interrupted download leaves `path` with ".part" added, where the next one resumes.
    Downloads into one folder wait for each other, also those of other processes.

    Args:
        url: of the file.
        path: to write; its folder is created if missing. If its name ends in "-" and eight
            hexadecimal digits, as those for torch.hub do, the file's SHA-256 must begin with them.

    Raises:
        FileNotFoundError: it cannot be downloaded.
        ValueError: its hash is not that of its name.
        ImportError: a package for downloads is not installed.
    """
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # by another process
            return
        try:
            with open(part, "ab") as file:
                _resume(url, file)
        except OSError as error:  # and all of requests' errors
            if part.exists() and not os.path.getsize(part):
                part.unlink()
            raise FileNotFoundError(
                f"{_failure(url, error)}, or save the file as {path}"
            ) from error
        digits = re.search(r"-([0-9a-f]{8})$", path.stem)
        if digits and not file_sha256(part).startswith(digits[1]):
            part.unlink()
            raise ValueError(f"{url} is damaged: its SHA-256 does not begin with {digits[1]}")
        os.replace(part, path)


def _resume(url: str, file: BinaryIO) -> None:
    """Appends to a file what is missing."""
    try:
        import requests
        import tqdm
    except ImportError as error:
        raise ImportError(f"{url} is downloaded by requests and tqdm: {_INSTALL}") from error
    size = file.seek(0, os.SEEK_END)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={size}-"} if size else {})
    with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as answer:
        start, total = _part_of(answer.headers)
        if size and (answer.status_code == 416 or start not in (0, size)):
            file.truncate(0)  # there is no more, or it is another file by now
            return _resume(url, file)
        answer.raise_for_status()
        size = file.truncate(start)
        with tqdm.tqdm(total=total or None, initial=size, unit="B", unit_scale=True) as bar:
            for chunk in answer.iter_content(_CHUNK):
                bar.update(file.write(chunk))
    file.flush()
    length = file.seek(0, os.SEEK_END)
    if total and length != total:
        file.truncate(length if length < total else 0)
        raise OSError(f"{length} bytes arrived, of {total}")


def _part_of(headers: Mapping[str, str]) -> tuple[int, int]:
    """Where the content of an answer begins in its file, and the file's length (0: unknown)."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
    return (int(match[1]), int(match[2])) if match else (0, int(headers.get("Content-Length", 0)))
