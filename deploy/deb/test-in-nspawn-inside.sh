#!/bin/bash
# Tests the package from installation to purge. Runs as a service of the machine that test-in-nspawn.sh --deb boots.
. /given/checkout/deploy/machine-steps.sh

package=/given/hangwatch.deb
config=/etc/hangwatch/hangwatch.toml
unit=/usr/lib/systemd/system/hangwatch.service
quiet() { "$@" >/tmp/said 2>&1 || { cat /tmp/said; return 1; }; }
# An upgrade: the same content with a later version.
later() {
  dpkg-deb --raw-extract $package /tmp/later && sed -i 's/^Version: .*/&+1/' /tmp/later/DEBIAN/control &&
    dpkg-deb -Znone --build /tmp/later /tmp/later.deb
}

echo "--- install"
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
see "the package installs without a network" quiet dpkg --install $package
see "where policy-rc.d says no it starts nothing" eval '! systemctl is-active --quiet hangwatch'
rm /usr/sbin/policy-rc.d
see "it is removed" quiet dpkg --purge hangwatch
see "and installed again, as anywhere" quiet dpkg --install $package
see "the service is enabled" systemctl is-enabled --quiet hangwatch
see "it said READY" within 20 systemctl is-active --quiet hangwatch
see "it runs as hangwatch" test "$(ps -o user= -p "$(property MainPID)")" = hangwatch
see "the command is on the path of root and of others" setpriv --reuid=65534 --regid=65534 --clear-groups hangwatch --version
see "/metrics answers" within 20 metric '^hangwatch_build_info'
see "a sample lies beside the configuration" grep -q '^\[detector\]' /etc/hangwatch/hangwatch.sample.toml
see "py-spy is inside" /opt/hangwatch/bin/py-spy --version
see "it has a manual" eval 'zcat /usr/share/man/man1/hangwatch.1.gz | grep -q "^\.TH"'
see "bash completes its words" bash -c '. /usr/share/bash-completion/completions/hangwatch && complete -p hangwatch && COMP_WORDS="hangwatch du" COMP_CWORD=1 _HANGWATCH_COMPLETE=bash_complete hangwatch | grep -q dump'
see "every file is as it was packed" test -z "$(dpkg --verify hangwatch)"

echo "--- upgrade"
echo '# mine' >>$config
before=$(property MainPID)
see "a later version is packed" quiet later
see "and installed" quiet dpkg --install /tmp/later.deb
see "the configuration is as it was" grep -q '^# mine' $config
see "the service was started again" within 20 eval 'systemctl is-active --quiet hangwatch && test "$(property MainPID)" != "$before"'
see "it serves" within 20 metric '^hangwatch_build_info'
see "a service that was disabled stays so" eval \
  'systemctl disable --quiet --now hangwatch && quiet dpkg --install $package && ! systemctl is-active --quiet hangwatch && ! systemctl is-enabled --quiet hangwatch'
systemctl enable --quiet --now hangwatch

echo "--- both ways of installing"
see "install.sh refuses where the package is" eval '! /given/checkout/deploy/systemd/install.sh 2>/tmp/said && grep -q "apt remove hangwatch" /tmp/said'

echo "--- remove and purge"
mkdir -p /var/lib/hangwatch/incidents
see "it is removed" quiet dpkg --remove hangwatch
see "program, unit and command are gone" gone /opt/hangwatch $unit /usr/bin/hangwatch
see "the service is stopped" eval '! pgrep --uid hangwatch'
see "configuration and incidents are kept" test -e $config -a -d /var/lib/hangwatch/incidents
see "it is purged" quiet dpkg --purge hangwatch
see "those are gone as well" gone /etc/hangwatch /var/lib/hangwatch
see "the user stays, as Debian has it" id hangwatch
touch /etc/systemd/system/hangwatch.service
see "the package refuses where install.sh was" eval '! dpkg --install $package >/tmp/said 2>&1 && grep -q "install.sh --uninstall" /tmp/said'
finish 0
