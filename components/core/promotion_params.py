"""Parameters of the registry of policy versions, and of the gates that decide which of them is promoted.

They are a part of the parameters in params.py, where the kinds of parameters are explained.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from components.core.files import sqlalchemy_path
from components.core.records import FrozenModel, Share, result, throughput

# MLflow's database in the home, if registry.tracking_uri is empty.
DATABASE = Path("mlflow", "mlflow.db")


class Registry(FrozenModel):
    """Parameters of MLflow, and of the audit chain, the signed log of decisions on policy versions."""

    tracking_uri: str = result("MLflow tracking URI; empty is SQLite in the home folder")
    experiment: str = result("MLflow experiment")
    # MLflow allows neither slashes nor colons, and quotes end the texts of its filters.
    model: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")] = result("MLflow registered model")
    audit: str = result(
        "folder of the audit chain and its lock; "
        "empty is in the home folder. Machines that promote in one registry share it"
    )
    key: str = throughput(
        "file with the Ed25519 private key, in OpenSSH's format, that signs decisions; empty is signing_key "
        "in cuda-agent/ of the user's configuration, which the first run makes"
    )
    trusted_keys: str = throughput(
        "file with the public keys whose signatures are accepted, one per line with its owner's name; empty "
        "is trusted_keys in the folder of the key"
    )

    def uri(self, home: Path) -> str:
        """Return `tracking_uri` or, if that is empty, the address of the SQLite database in `home`.

        `home` is the folder of a run's files, and the address is `sqlite:///` with the path of
        mlflow/mlflow.db in this folder.
        """
        return self.tracking_uri or f"sqlite:///{sqlalchemy_path(home / DATABASE)}"


class GateThresholds(FrozenModel):
    """Thresholds of the gates: the conditions under which a trained policy may become the champion.

    The champion is the promoted version of the policy in the registry. `approval` and `approval_seconds` say
    whether a person has to approve a version that passes the gates, and how long it waits.
    """

    pass_rate: Share = result("least lower end of the share of tasks that are solved")
    faster_rate_eager: Share = result("least lower end of the share of tasks faster than eager")
    faster_rate_compile: Share = result("least lower end of the share of tasks faster than torch.compile")
    faster_rate_compile_by_level: dict[int, Share] = result(
        "the same for single levels of the suite, by level"
    )
    geomean_eager: Annotated[float, Field(ge=0)] = result(
        "least lower end of the geometric mean of the speed-up against eager over correct solutions"
    )
    geomean_compile: Annotated[float, Field(ge=0)] = result("the same against torch.compile")
    limit_score: Share = result(
        "least lower end of the mean over tasks of 1 / (1 + (t - limit) / (baseline - limit)), which is 0.5 "
        "at the faster baseline and 1 at the limit of the device"
    )
    regression: Share = result(
        "largest drop of a rate below the champion on the same tasks; "
        "a drop that is within the noise does not count"
    )
    improvement: bool = result(
        "whether a version has to be better than the policy that its run began with, in at least one figure "
        "and beyond the interval of the change, and in no figure worse"
    )
    measured: Share = result("least share of tasks that the judge could measure")
    exploits: Share = result(
        "least share of the sample of exploits that the measuring device's judge refuses; "
        "the honest answers have to pass"
    )
    approval: Literal["automatic", "person"] = result("who decides when the gates pass")
    approval_seconds: Annotated[float, Field(gt=0, le=1e9)] = result(
        "a version that waits longer than this for a person's decision expires"
    )
