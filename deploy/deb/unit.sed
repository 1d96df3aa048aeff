# Turns a unit of deploy/systemd into the unit of a package, whose user is created by sysusers.d.
# The agent's token file is a key of its configuration, so that an agent with a certificate needs
# no token file.
1,/^$/ {
  /^#/d
  s|^$|# Settings: /etc/culvert/@PROGRAM@.yaml. Change this unit with: systemctl edit @PROGRAM@\n|
}
s|^Documentation=.*|Documentation=man:@PROGRAM@(8)|
/^After=/a ConditionPathExists=/etc/culvert/@PROGRAM@.yaml
s|/usr/local/bin/|/usr/bin/|
s|/etc/@PROGRAM@/config.yaml|/etc/culvert/@PROGRAM@.yaml|
s| --token-file %d/token||
/^LoadCredential=/d
/^ConfigurationDirectory=/d
/^# systemd creates a user/d
s|^DynamicUser=yes|User=@PROGRAM@\nGroup=@PROGRAM@\nRemoveIPC=yes|
