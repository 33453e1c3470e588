#!/usr/bin/env bash
# From a checkpoint to a release: convert, verify, measure, judge, and promote what passed.
#
#   MODEL=org/name RECIPE=awq-g128 CHANNEL=canary docs/pipeline.sh
#
# variable  what it is                                                     where it is not set
# MODEL     directory, hub id (org/name@revision) or .gguf file            an error
# RECIPE    recipe, by name or path                                        rtn-g64-zp
# SETTINGS  keys of the recipe to change, as "weights.bits=8 ignore=[]"    none
# CALIB     calibration set, by name or path                               the recipe's
# SUITE     what is measured, by name or path                              standard
# POLICY    what is judged, by name or path; its suite must be SUITE       release
# OUTPUT    the artifact; one that is there already is measured again      build/artifact
# RESULTS   what reviewers and CI read: page, JUnit, report, statements    build/results
# KEY       EC private key in PEM to sign with                             not signed
# BUILDER   URI of the platform that runs this, for the provenance         the quantkit that ran
# CHANNEL   channel of the ledger to promote to                            nothing is promoted
# LEDGER    the ledger                                                     manifests
#
# Leaves with the code of the step that stopped it: 1 a check said no, 2 bad input, 3 interrupted (run it again). The
# results of a gate that says no are all there; such an artifact is neither signed nor promoted.
set -euo pipefail

if [ -z "${MODEL:-}" ]; then
    echo "pipeline: MODEL is not set; name a model directory, a hub id or a .gguf file" >&2
    exit 2
fi
RECIPE=${RECIPE:-rtn-g64-zp} SUITE=${SUITE:-standard} POLICY=${POLICY:-release}
OUTPUT=${OUTPUT:-build/artifact} RESULTS=${RESULTS:-build/results} LEDGER=${LEDGER:-manifests}
mkdir -p "$RESULTS"

if [ ! -e "$OUTPUT" ]; then
    options=(--recipe "$RECIPE" --output "$OUTPUT" --resume) # a run that was interrupted goes on
    if [ -n "${CALIB:-}" ]; then options+=(--calib "$CALIB"); fi
    read -ra settings <<< "${SETTINGS:-}"
    for setting in "${settings[@]}"; do options+=(--set "$setting"); done
    quantkit convert "$MODEL" "${options[@]}"
fi
quantkit verify "$OUTPUT"
quantkit eval "$OUTPUT" --suite "$SUITE"

verdict=0
quantkit gate "$OUTPUT" --policy "$POLICY" --junit "$RESULTS/gate.xml" || verdict=$?
if [ "$verdict" -gt 1 ]; then exit "$verdict"; fi # it could not judge, so there is nothing to show
quantkit report "$OUTPUT" --suite "$SUITE" --policy "$POLICY" --output "$RESULTS/report.html"
quantkit attest "$OUTPUT" --format slsa ${BUILDER:+--builder-id "$BUILDER"} --output "$RESULTS/provenance.json"
quantkit attest "$OUTPUT" --format cyclonedx --output "$RESULTS/bom.cdx.json"
cp "$OUTPUT/manifest.json" "$OUTPUT/README.md" "$RESULTS/"
if [ "$verdict" -ne 0 ]; then exit "$verdict"; fi

if [ -n "${KEY:-}" ]; then
    quantkit sign "$OUTPUT" --key "$KEY"
fi
if [ -n "${CHANNEL:-}" ]; then
    quantkit promote "$OUTPUT" --channel "$CHANNEL" --policy "$POLICY" --ledger "$LEDGER"
fi
