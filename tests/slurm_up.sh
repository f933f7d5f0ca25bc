#!/usr/bin/env bash
# A SLURM of one node on this machine, for `pytest -m slurm`; `tests/slurm_up.sh stop` ends it. Needs root. Installs
# Debian's slurm-wlm and munge where they are missing; says so and exits with 77 where it cannot.
set -euo pipefail
state=/var/tmp/lingrok-slurm
if [ "${1:-start}" = stop ]; then
  for daemon in slurmd slurmctld; do
    if [ -f "$state/$daemon.pid" ]; then kill "$(cat "$state/$daemon.pid")" 2>/dev/null || true; fi
  done
  exit 0
fi
if [ "$(sinfo -h -o %t 2>/dev/null)" = idle ]; then exit 0; fi  # there is one already
skip() { echo "slurm_up: $1; the SLURM tests are skipped" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip 'not root'
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
  command -v apt-get >/dev/null || skip 'no slurmctld and no apt-get'
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y slurm-wlm munge; } >/dev/null 2>&1 ||
    skip 'slurm-wlm and munge cannot be installed'
fi
mkdir -p "$state/ctld" "$state/spool" /etc/slurm /run/munge
chown munge /run/munge
cat > /etc/slurm/slurm.conf <<CONF
ClusterName=lingrok
SlurmctldHost=$(hostname)(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=$(hostname) Default=YES MaxTime=INFINITE State=UP
CONF
pgrep -x munged >/dev/null || munged --force
slurmctld -c || skip 'slurmctld does not start'  # -c: without the jobs of an earlier one
slurmd || skip 'slurmd does not start'
for _ in $(seq 60); do
  if [ "$(sinfo -h -o %t 2>/dev/null)" = idle ]; then exit 0; fi
  sleep 1
done
skip "the node did not become idle, see $state/slurmctld.log"
