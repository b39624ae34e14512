"""The files that torch.compile and Triton keep of a compilation, packed in one archive for the judge.

This file runs only inside the sandbox. The judge keeps the archive without reading it, and gives it to the
next runner that compiles the same task (components/judge/compile_cache.py).
"""

import os
import shutil
import zipfile
from pathlib import Path


class CompileArtefacts:
    """The folders of Inductor and Triton in this runner's private working folder.

    They hold generated sources, compiled kernels, compiled graphs and the results of autotuning.
    """

    def __init__(self, descriptor: int):
        """Create the folders, and unpack the archive in the file `descriptor` unless the file is empty.

        An archive that cannot be unpacked is ignored.
        """
        self.folder = Path.cwd() / "inductor"
        self.folder.mkdir(exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        os.environ["TRITON_CACHE_DIR"] = str(self.folder / "triton")
        # Names of the files that the judge's cache has.
        self.unpacked: set[str] = set()
        if os.fstat(descriptor).st_size:
            try:
                self._unpack(descriptor)
                self.unpacked.update(self.files())
            except Exception:  # a task's source may have written anything
                shutil.rmtree(self.folder)

    def _unpack(self, descriptor: int) -> None:
        with open(descriptor, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                # An existing file may be a library that this process has loaded in an earlier role.
                if not (self.folder / name).exists():
                    archive.extract(name, self.folder)

    def files(self) -> list[str]:
        """Return the paths of the files that `save` puts into an archive, relative to `folder`.

        Kernels in Triton's folder are left out. Inductor stores the kernels that it uses in its compiled
        graphs too, and kernels that were compiled only to be timed by max-autotune would make an archive many
        times as large. Triton's libraries for the host are included.
        """
        names = [path.relative_to(self.folder) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return [str(name) for name in names if name.parts[0] != "triton" or name.suffix == ".so"]

    def save(self, descriptor: int) -> None:
        """Write an archive to the empty file `descriptor` if this runner has compiled anything.

        The file stays empty if the archive cannot be written, for example because it is too large.
        """
        files = self.files()
        if self.unpacked.issuperset(files):
            return
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.seek(0)
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    for name in files:
                        archive.write(self.folder / name, name)
        except OSError:
            os.ftruncate(descriptor, 0)
