# Sourced by the other .sh files: with -h or --help as the first argument, print the comment at the head of the file that
# sources this (without lines for other programs, such as #SBATCH) and the presets, if they are known; then end.
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# //p' "${BASH_SOURCE[1]}"
    if [ -n "${preset_names:-}" ]; then echo "PRESET is one of: $preset_names"; fi
    exit
    ;;
esac
