const char *whose(void) { return "the next one's"; }
const char *cuWhose(void) { return "the next one's"; }
