#include "multicast.h"
