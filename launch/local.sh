#!/usr/bin/env bash
# A run on this machine with Ray's dashboard and job server: launch/local.sh [+experiment=NAME] [group.key=value ...]
#
# Starts a head node with a token and the dashboard on the loopback address, trains on it in the foreground, and ends what it
# started. Ctrl-C and SIGTERM end the run in order: it saves the last finished step. Without a setting to give, `make run` needs none of this.
#   PORT=6379 DASHBOARD_PORT=8265   of the head node
#   CPUS=N                          of the head node: reservations, not cores; default: the machine's, or as many as the run's workers ask for
#   KEEP=1                          leave the head node running when the run ends, for launch/submit.sh
#   PYTHON=python                   the interpreter that has infsample_rl; ray is taken from beside it
# Checked: shellcheck. tests/launch/test_launch_scripts.py (slow) runs it with a real training and a SIGTERM; docs/launch.md says how far that went.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
command -v "$PYTHON" > /dev/null || { echo "error: no interpreter $PYTHON: activate the environment, or set PYTHON" >&2; exit 2; }
PATH="$(dirname "$(command -v "$PYTHON")"):$PATH"
# shellcheck source=launch/token.sh
source "$here/token.sh"
port=${PORT:-6379} dashboard=${DASHBOARD_PORT:-8265}
# Else the run would join the cluster that is there, and end with it.
for choice in "PORT=$port" "DASHBOARD_PORT=$dashboard"; do
  ! (exec 3<> "/dev/tcp/127.0.0.1/${choice#*=}") 2> /dev/null || fail "$choice is taken, perhaps by another cluster: set ${choice%%=*} to a free port"
done

cpus=${CPUS:-$("$PYTHON" -c '
import os, sys
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import ConfigError, parse_flags
from infsample_rl.main import FLAGS
from infsample_rl.plan.placement import local_cpus
try:
    options = parse_flags(sys.argv[1:], FLAGS)
    print(local_cpus(load_config(options.words, options.config_dir)))
except ConfigError:  # the run says what is wrong with a setting
    print(os.cpu_count())' "$@")}
make_token
scratch=$(mktemp -d)
# In a session of its own, so that Ctrl-C ends the run first and the cluster after it.
setsid ray start --head --block --num-cpus="$cpus" --port="$port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" > "$scratch/ray.log" 2>&1 &
head=$!
driver=

# shellcheck disable=SC2317,SC2329 # a trap calls it
end_cluster() {
  if [ -n "${KEEP:-}" ] && kill -0 "$head" 2> /dev/null; then
    echo "the cluster goes on: http://127.0.0.1:$dashboard; end it with: kill $head"
  else
    kill -TERM "$head" 2> /dev/null || true
    wait "$head" || true
  fi
  rm -rf "$scratch"
}
trap end_cluster EXIT
signalled=
trap 'signalled=1; [ -z "$driver" ] || kill -TERM "$driver" 2> /dev/null || true' TERM INT # a shell starts what is in the background with SIGINT ignored

up=
for _ in $(seq 120); do
  kill -0 "$head" 2> /dev/null || { cat "$scratch/ray.log" >&2; fail "Ray did not start"; }
  ray status --address "127.0.0.1:$port" > /dev/null 2>&1 && up=1 && break
  sleep 1
done
[ -n "$up" ] || { cat "$scratch/ray.log" >&2; fail "Ray did not start within two minutes"; }
echo "dashboard: http://127.0.0.1:$dashboard (token: $RAY_AUTH_TOKEN_PATH)"

[ -z "$signalled" ] || { echo "stopped before the run began" >&2; exit 130; }
"$PYTHON" -m infsample_rl.main "$@" cluster.address="127.0.0.1:$port" &
driver=$!
while kill -0 "$driver" 2> /dev/null; do # a signal ends `wait`, not the run
  wait "$driver" || true
done
wait "$driver"
