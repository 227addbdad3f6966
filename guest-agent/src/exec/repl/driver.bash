# Runs each source text that the agent names in this shell. Descriptor $1 is the agent's; $2 is the
# folder with the texts.
__casulo_fd=$1 __casulo_folder=$2
shift 2
while IFS= read -r -u "$__casulo_fd" __casulo_call; do
    . "$__casulo_folder/setup-$__casulo_call" &&
        . "$__casulo_folder/code-$__casulo_call" <"$__casulo_folder/stdin-$__casulo_call"
    __casulo_status=$?
    # What one call demands of its commands the next one does not.
    set +eu
    printf '{"call":%s,"exit":%s}\n' "$__casulo_call" "$__casulo_status" >&"$__casulo_fd"
done
