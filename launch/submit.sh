#!/usr/bin/env bash
# A run as a Ray job, on the cluster whose job server --address names.
#
#   launch/submit.sh [OPTIONS] [+experiment=NAME] [group.key=value ...]    submit, follow the log; Ctrl-C stops the job
#   launch/submit.sh follow ID      the log of a job, until it ends
#   launch/submit.sh status ID      PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
#   launch/submit.sh stop ID        SIGTERM, and SIGKILL when the grace it was submitted with is over
#
#   --address URL       job server (default: $RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265, e.g. through ssh -L 8265:127.0.0.1:8265 HEAD)
#   --id ID             of the job; default infsample_rl-<date>-<time>
#   --working-dir DIR   what the job gets a copy of (default: this checkout); runs, environments and .git stay behind
#   --grace SECONDS     between SIGTERM and SIGKILL (default: 30 more than a run.grace_s given here, else 150); run.grace_s is 30 less unless given
#   --no-follow         submit and leave
#
# run.dir is made absolute, against the current directory, and must be a folder that every node shares; the same command with the same
# run.dir goes on from the last checkpoint (run.resume=auto). Exit codes: 0 succeeded, 1 failed, 2 wrong use, 130 stopped.
# Checked: shellcheck. tests/launch/test_cluster.py (slow) submits, follows, stops and resubmits on two real Ray nodes; docs/launch.md says
# how far that went.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/token.sh
source "$here/token.sh"

address=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
id="infsample_rl-$(date +%Y%m%d-%H%M%S)"
working_dir=$(dirname "$here")
grace='' follow=1 action=submit run_dir=''
follower=''
settings=()
# As in a .gitignore: without a slash at any depth, where a package may be called build or env.
EXCLUDED='"/runs", ".git", "/wandb", "/outputs", "/build", "/dist", "*.egg-info", "**/__pycache__", ".*_cache", ".env", "*.pem", "*.key"'

case ${1:-} in
  follow | status | stop)
    action=$1
    shift
    ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^# Checked/{/^# Checked/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    --no-follow) follow= ;;
    --address | --id | --working-dir | --grace | --config-dir)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --address) address=$2 ;;
        --id) id=$2 ;;
        --working-dir) working_dir=$2 ;;
        --grace) grace=$2 ;;
        --config-dir) settings+=("$1" "$2") ;;
      esac
      shift
      ;;
    --*) fail "there is no option $1 (launch/submit.sh --help)" ;;
    follow | status | stop) fail "$1 comes first: launch/submit.sh $1 ID" ;;
    *) settings+=("$1") ;;
  esac
  shift
done

# Ray says it in its first line: "Status for job 'ID': RUNNING" while a job lives, "Job 'ID' succeeded" when it has ended.
status_of() {
  ray job status --address "$address" --log-style record --log-color false "$1" 2> /dev/null \
    | grep -F "'$1'" | head -n 1 | sed "s/'$1'//" | grep -oiE 'pending|running|succeeded|failed|stopped' | tr '[:lower:]' '[:upper:]'
}

# The exit code that a job's status stands for.
code_of() {
  case $1 in
    SUCCEEDED) return 0 ;;
    STOPPED) return 130 ;;
    *) return 1 ;;
  esac
}

follow_job() {
  # The stream can break while the job goes on: it is taken up again, from its start, until the job has ended.
  local status=RUNNING misses=0
  while [ "$status" = RUNNING ] || [ "$status" = PENDING ]; do
    ray job logs --address "$address" --follow --log-style record "$1" 2> /dev/null & # in the background, so that a trap acts at once
    follower=$!
    wait "$follower" || true
    until status=$(status_of "$1"); do # as through a tunnel that is made anew
      [ $((misses += 1)) -lt 12 ] || fail "the job server at $address does not answer for $1, which may go on: launch/submit.sh follow $1"
      sleep 5
    done
    misses=0
    sleep 1
  done
  echo "$1: $status"
  code_of "$status"
}

stop_job() {
  trap '' INT TERM
  ray job stop --address "$address" --log-style record "$1" > /dev/null || fail "$1 could not be stopped at $address"
}

need_token
command -v ray > /dev/null || fail "no ray on the PATH: activate the environment"
if [ "$action" != submit ]; then
  [ ${#settings[@]} -eq 1 ] || fail "launch/submit.sh $action ID"
  id=${settings[0]}
  [ "$action" = stop ] || status=$(status_of "$id") || fail "the job server at $address does not know $id, or does not answer"
  case $action in
    status) echo "$status" ;;
    follow) follow_job "$id" ;;
    stop)
      stop_job "$id"
      ray job logs --address "$address" --log-style record "$id" 2> /dev/null | tail -n 5 || true
      echo "$id: $(status_of "$id")"
      ;;
  esac
  exit
fi

# As Hydra reads a value: quotes around it where it holds more than letters of a plain path.
unquoted() { local text=$1; [[ $text != \"*\" && $text != \'*\' ]] || text=${text:1:-1}; printf '%s' "$text"; }
quoted() { if [[ $1 =~ ^[A-Za-z0-9_./-]+$ ]]; then printf '%s' "$1"; else printf '"%s"' "${1//\"/\\\"}"; fi; }

job=()
for setting in ${settings[@]+"${settings[@]}"}; do
  case $setting in
    run.dir=*) run_dir=$(unquoted "${setting#run.dir=}") ;;
    run.grace_s=*)
      seconds=${setting#run.grace_s=}
      [[ $seconds =~ ^[0-9]+(\.[0-9]*)?$ ]] || fail "$setting must be seconds, as 120 or 120.0"
      grace=${grace:-$((${seconds%.*} + 30))}
      job+=("$setting")
      ;;
    cluster.address=*) fail "$setting: a job runs on the cluster it is submitted to; give --address" ;;
    *) job+=("$setting") ;;
  esac
done
run_dir=${run_dir:-runs/$id}
case $run_dir in
  /*) ;;
  "~"*) fail "run.dir=$run_dir: give an absolute path" ;;
  *) run_dir=$PWD/$run_dir ;;
esac
grace=${grace:-150}
[[ $grace =~ ^[0-9]+$ ]] || fail "--grace must be whole seconds, got $grace"
[ -n "${seconds:-}" ] || [ "$grace" -le 30 ] || job+=("run.grace_s=$((grace - 30))") # else a save of more than its 30 s is not begun
[ -d "$working_dir" ] || fail "--working-dir $working_dir is not a folder"
for mark in "$working_dir"/{,.[!.]}*/{pyvenv.cfg,conda-meta}; do # an environment by what it holds: env/ may be the project's code
  [ ! -e "$mark" ] || EXCLUDED+=", \"/$(basename "$(dirname "$mark")")\""
done

said=$(ray job submit --address "$address" --submission-id "$id" --working-dir "$working_dir" --no-wait --log-style record \
  --runtime-env-json "{\"excludes\": [$EXCLUDED], \"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"$grace\"}}" \
  -- python -m infsample_rl.main ${job[@]+"${job[@]}"} "run.dir=$(quoted "$run_dir")" cluster.address=auto 2>&1 > /dev/null) || {
  reason=$(grep -E '^[A-Za-z_.]+(Error|Exception): ' <<< "$said" | tail -n 1) || true # of a traceback of a hundred lines
  fail "$id was not submitted to $address: ${reason:-$said}"
}
echo "$id: submitted to $address; run.dir=$run_dir; ${grace} s between SIGTERM and SIGKILL"
[ -n "$follow" ] || exit 0
trap 'echo "stopping $id"; stop_job "$id"; wait "$follower" || true; echo "$id: $(status_of "$id")"; exit 130' INT TERM
follow_job "$id"
