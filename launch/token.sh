# shellcheck shell=bash
# Sourced by the other files: Ray's token authentication, with the token in a file of mode 600 that is never printed.
# RAY_AUTH_TOKEN_PATH names the file (default ~/.ray/auth_token, where Ray itself looks); RAY_AUTH_MODE=disabled turns all of it off.
# Checked: shellcheck, and tests/launch/test_launch_scripts.py makes and reads a token.

export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"

fail() {
  echo "error: $*" >&2
  exit 2
}

# Make the token if there is none. Ray writes a new one below HOME and prints it, so both go where we want them.
make_token() {
  [ "$RAY_AUTH_MODE" = token ] || return 0
  if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    (
      umask 077
      mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
      scratch=$(mktemp -d)
      trap 'rm -rf "$scratch"' EXIT
      env -u RAY_AUTH_TOKEN_PATH -u RAY_AUTH_TOKEN HOME="$scratch" ray get-auth-token --generate > "$RAY_AUTH_TOKEN_PATH" 2> "$scratch/said" \
        || { rm -f "$RAY_AUTH_TOKEN_PATH"; cat "$scratch/said" >&2; exit 1; }
    ) || fail "no token could be made in $RAY_AUTH_TOKEN_PATH"
  fi
  chmod 600 "$RAY_AUTH_TOKEN_PATH"
}

# The token must be there already: it is the cluster's.
need_token() {
  [ "$RAY_AUTH_MODE" = token ] || return 0
  [ -s "$RAY_AUTH_TOKEN_PATH" ] || fail "no token in $RAY_AUTH_TOKEN_PATH: copy it from the head node (mode 600), or set RAY_AUTH_TOKEN_PATH"
}
