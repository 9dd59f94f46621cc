${upgrades}
${downgrades}
