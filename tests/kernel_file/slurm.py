"""A stand-in for Slurm. A job begins when it is submitted, and its tasks are processes on this machine."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = {
    "sbatch": """
id=$(ls "$folder/jobs" | wc -l)
cp "$1" "$folder/jobs/$id"
SLURM_JOB_ID=$id SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 \\
    setsid bash "$folder/jobs/$id" >>"$folder/said" 2>&1 </dev/null &
echo "Submitted batch job $id"
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do
    case "$1" in --output | --error) shift 2 ;; *) shift ;; esac
done
exec "$@"
""",
    "sacct": "echo 'JobID|State|NodeList'",
    "scancel": "",
}


def install(folder: Path) -> Path:
    """Write the programs into a folder. They store the scripts of jobs in `jobs`, by their numbers."""
    (folder / "jobs").mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\nfolder={folder}\n{text.strip()}\n")
        (folder / name).chmod(0o755)
    return folder
